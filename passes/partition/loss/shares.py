"""Make the loss of a microbatch its share of the loss of the global batch, so that shares simply add up.

A model writes a mean over its batch. Over microbatches and data-parallel ranks the mean of means is wrong as soon as
they hold different numbers of valid tokens. So each value that a model computes over its batch gets its value over the
global batch, of n microbatches:

    cross_entropy(mean)       → cross_entropy(sum) / Σ over the global batch of (targets ≠ ignore_index)
    mask.sum(), mask.mean()   → their value over the global batch, for all readers (passes.partition.loss.counts)
    8, ones(8).sum() …        → that of a graph of the global batch, if it differs (passes.partition.loss.scaling)
    sum over the batch        → itself: shares are sums
    mean over the batch       → itself / n     (equal sizes: exact)
    value without a batch     → itself / n     (a penalty on weights counts once)
    a + b, a·c, −a, casts …   → term by term
    a product of means …      → of the whole global batch, whose sums are counted (passes.partition.loss.counts)
    anything else             → itself / n, and a warning that names the line
    sums of half precision    → in float32     (passes.partition.loss.scaling)

The kind of a value decides which of these applies (passes.partition.loss.kinds): by the graph's form if that leaves no
doubt (passes.partition.loss.form), else by a second capture (passes.partition.batch.batch_typing). An op that mixes the
sequences of a batch before the loss is reported too: no share can correct it.

Leaves:  a graph with one placeholder for each count, and a second graph that computes the counts of one microbatch.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

from torch import fx

from passes.errors import PlanError
from passes.partition.batch import mixing
from passes.partition.batch.align_exports import TwoCaptures, lay_on
from passes.partition.batch.batch_typing import Typing, sums_rows
from passes.partition.batch.orders import Orders
from passes.partition.batch.sequences import Sequences
from passes.partition.loss.counts import Counts, LossTerms, Together, counts_labels, over_all_labels
from passes.partition.loss.form import is_certain, kinds_by_form, loss_region
from passes.partition.loss.kinds import (
    AFFINE,
    LOOSE,
    MEAN,
    ROWS,
    SHARE,
    UNIT,
    UNKNOWN,
    WHOLE,
    Kind,
    call_like,
    is_mean,
    linear_in,
    whole,
)
from passes.partition.loss.scaling import Scaling, corrected, widen
from passes.program.builder import prune
from passes.program.known_values import Constants
from passes.program.ops.aten import arguments, aten, cut_of, splits
from passes.program.ops.groups import CROSS_ENTROPIES, DIVISIONS, SOFTMAXES
from passes.program.ops.own_backward import adds_up
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk

MAX_ELEMENTS = 1 << 24
LOOPED = 64  # if a graph may hold a loop over its sequences, the second capture has at most this many

Recapture = Callable[[int], Program]


def share_loss(
    program: Program, num_microbatches: int, recapture: Recapture | None = None, *, in_turn: int = 0
) -> LossTerms:
    """Rewrite ``program``'s loss in place; ``num_microbatches`` counts those of the full global batch (all dp ranks).

    ``in_turn``: those that each dp rank runs; what is no sum over them is then computed of sums over all. 0: of each
    microbatch by itself, with a warning.
    ``recapture(k)`` gives the program of k times as many sequences, for a loss with numbers that may count them.
    """
    terms = LossTerms()
    rewriter = _Rewriter(program, num_microbatches, terms, in_turn)
    if num_microbatches > 1:
        rewriter.find_kinds(recapture)
        rewriter.warn_of_ops()
    share = rewriter.whole_loss()
    program.graph.graph.output_node().args = ((share,),)
    wide = widen(program.graph.graph, [share, *rewriter.counts.counted])
    share = wide.get(share, share)
    rewriter.counts.counted = [wide.get(count, count) for count in rewriter.counts.counted]
    program.graph.graph.output_node().args = ((share,),)
    program.loss = share.name
    rewriter.counts.finish()
    prune(program.graph.graph)
    program.graph.recompile()
    is_shared = num_microbatches > 1 or terms.counts is not None
    notes = terms.inexact, terms.added, terms.mixed, terms.unknown, terms.doubts, terms.counted_first
    terms.adds_up = is_shared and not rewriter.averages and not any(notes) and terms.levels == 1
    return terms


class _Rewriter:
    """Owns the kinds of the values, and writes the share."""

    def __init__(self, program: Program, num_microbatches: int, terms: LossTerms, in_turn: int) -> None:
        self.program, self.total, self.terms = program, num_microbatches, terms
        self.in_turn = in_turn if num_microbatches > 1 else 0
        self.counts = Counts(program, terms)
        self.graph = program.graph.graph
        self.kinds: dict[fx.Node, Kind] = {}
        self.together: Together | None = None
        self.averages = False  # whether a term is divided by the number of microbatches
        self.single: set[fx.Node] = set()
        self.growing: set[fx.Node] = set()  # sums that have more terms in a larger batch
        self.totals: set[fx.Node] = set()  # sums over the dim that follows the batch, whatever their terms are
        self.sequences = Sequences(program)
        self.on_batch = self.sequences.on_batch

    # ---- kinds

    def find_kinds(self, recapture: Recapture | None) -> None:
        constants = Constants(self.program, of_shapes=True, max_elements=MAX_ELEMENTS)
        region = loss_region(self.program, self.on_batch)
        self.kinds, counts = kinds_by_form(self.program, self.on_batch, region)
        several = self.sequences
        if not self.program.widens or not is_certain(self.sequences, self.kinds, constants.nodes, region):
            second = _captured(recapture, self._times())
            if second is None:
                self._tell(self.terms.doubts, self.program.node(self.program.loss))
            else:
                several = Sequences(second[0])
                counts = self._by_two_captures(several, second[1], constants, region)
        self._warn_of_places(several)
        for node in counts:
            self.kinds[self.counts.globalise(node, self._by_op(node))] = whole

    def _times(self) -> int:
        """Return the second capture has the global batch; fewer sequences if the graph splits its batch, or may do so
        unseen, like that of one sequence."""
        size = self.sequences.size
        loops = size == 1 or any((cut_of(n) or splits(n)) and mixing.may_mix(n, self.on_batch) for n in self.on_batch)
        return min(self.total, max(2, LOOPED // size)) if loops else self.total

    def _by_two_captures(
        self, several: Sequences, times: int, constants: Constants, region: set[fx.Node]
    ) -> list[fx.Node]:
        """Return the kinds, with numbers and constants corrected; the counts."""
        program = several.program
        others = Constants(program, of_shapes=True, max_elements=MAX_ELEMENTS)
        captures = lay_on(self.graph, program.graph.graph, constants.nodes | others.nodes, times)
        scaling = Scaling(captures, constants, others, self.total)
        scaling.compare_numbers(self.graph)
        typing = Typing(self.program, captures, scaling, region, program.graph.graph)
        self.kinds, self.single = typing.kinds, typing.single
        self.growing = {n for n in captures.more if n.target is aten.add.Tensor and not n.meta["val"].dim()}
        self.totals = {n for n in self.graph.nodes if sums_rows(n, captures)}
        self._warn_of_mixing(typing)
        if not (captures.joins or captures.more or captures.taken):
            self._warn_of_unmatched(several, captures)
        for node in scaling.unknown:
            self._tell(self.terms.doubts, node)
        self.kinds |= {new: self.kinds[node] for node, new in corrected(scaling)}
        return typing.counts

    def _warn_of_mixing(self, typing: Typing) -> None:
        """Warn of ops that mix the sequences of a batch: in a microbatch they mix fewer."""
        tail = self._tail()
        inner = self.sequences.computed_along(tail)
        for node in (n for n in inner if not mixing.is_own_loss(n, tail) and n not in typing.counts):
            along = mixing.mixes(node, typing.captures.changed, typing.captures.others.get(node))
            if (along and not typing.takes_apart(node)) or node in typing.joins.apart:
                self._tell(self.terms.mixed, node)

    def _warn_of_unmatched(self, several: Sequences, captures: TwoCaptures) -> None:
        """Warn of ops that mix the sequences of the second capture and are not in the first: there a reshape to one
        sequence, for one, changed nothing."""
        matched, flow = set(captures.others.values()), mixing.dims_of(several.runs)
        for node in several.computed_along(loss_region(several.program, several.on_batch)):
            if node not in matched and mixing.mixes(node, flow.get):
                self._tell(self.terms.mixed, node)

    def _warn_of_places(self, several: Sequences) -> None:
        """Warn of sequences that are read by their places. ``several``: of the second capture, if there is one."""
        if several.size > 1:
            orders = Orders(several.program, several.on_batch, several.runs)
            inner = several.computed_along(loss_region(several.program, several.on_batch))
            for node in (*orders.several(), *orders.by_place(inner)):
                self._tell(self.terms.mixed, node)

    def _tail(self) -> set[fx.Node]:
        """Return the loss, and upwards all that is no value of single rows."""
        loss = self.program.node(self.program.loss)
        return set(walk([loss], operands, into=lambda n: n in self.on_batch and self.kinds[n].name != ROWS))

    def warn_of_ops(self) -> None:
        """Warn of batch normalisation in training, which takes the statistics of its input: here of one microbatch; of
        a backward on weights alone that is not linear: it gives for each microbatch another part of the gradient; and
        of ops without a rule: they may mix the sequences of a batch."""
        for node in self.graph.nodes:
            is_norm = "batch_norm" in getattr(node.target, "_opname", "") and node in self.on_batch
            if is_norm and arguments(node).get("training", True):
                self._tell(self.terms.inexact, node)
            if node not in self.on_batch and mixing.has_gradient(node) and not adds_up(node):
                self._tell(self.terms.mixed, node)
        for node in filter(mixing.is_unknown, self.sequences.computed_along(self._tail())):
            self._tell(self.terms.unknown, node)

    def _tell(self, where_to: list[tuple[str, Any]], node: fx.Node) -> None:
        row = str(node.target), where_of(node)
        if row not in where_to:
            where_to.append(row)

    # ---- the loss, from its end upwards

    def whole_loss(self) -> fx.Node:
        loss = self.program.node(self.program.loss)
        if self.total == 1:
            return self._cross_entropy(loss) if loss.target in CROSS_ENTROPIES else loss
        return self._inexact(loss) if self.kinds[loss].name == UNIT else self._share(loss)

    def _share(self, node: fx.Node) -> fx.Node:
        """Return a node with values over the microbatches that add up to ``node`` over the global batch."""
        kind = self.kinds[node].name
        if kind == WHOLE:
            return self._average(node)
        if kind == UNIT or node in self.single:
            return node
        return self._inexact(node) if kind == ROWS else self._by_op(node)

    def _by_op(self, node: fx.Node) -> fx.Node:
        kinds, linear = {self.kinds[n].name for n in node.all_input_nodes}, self._linear_in(node)
        no_kind = self.kinds[node].name == UNKNOWN
        if no_kind and linear and UNIT not in kinds and node in self.growing:
            raise _other_size(node, "adds terms of different parts of the batch, more of them for a larger batch")
        if no_kind and (not linear or UNIT in kinds or kinds <= {SHARE, LOOSE, WHOLE} or node in self.totals):
            self._refuse_other_size(node)
            return self._inexact(node)
        if node.target in CROSS_ENTROPIES:
            return self._cross_entropy(node)
        if not linear or (ROWS in kinds and not no_kind):
            return self._average(node) if is_mean(node) else node
        shares = {n: self._share(n) for n in linear}
        args = fx.map_arg(node.args, lambda n: shares.get(n, n))
        if node.target in AFFINE:
            self.averages |= any(isinstance(a, (int, float)) and a for a in args)
            args = tuple(a / self.total if isinstance(a, (int, float)) else a for a in args)
        return node if args == node.args else self._emit(node, node.target, list(args), dict(node.kwargs))

    def _linear_in(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that ``node`` is linear in, so that shares of them make a share of it."""
        moving = [n for n in node.all_input_nodes if self.kinds[n].name != WHOLE]
        names = {self.kinds[n].name for n in moving}
        if names == {ROWS} or (LOOSE in names and len(names) > 1):
            return []
        return linear_in(node, moving, numbers=LOOSE not in names)

    def _emit(self, like: fx.Node, target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            return call_like(like, target, args, kwargs)

    def _average(self, node: fx.Node) -> fx.Node:
        self.averages |= self.total > 1
        return node if self.total == 1 else self._emit(node, aten.div.Tensor, [node, self.total])

    def _inexact(self, node: fx.Node) -> fx.Node:
        if self.in_turn:
            self.together = self.together or Together(self.kinds, self._emit, self._share)
            made = self.together.whole(node)
            if made is not None:
                if self.in_turn > 1:
                    self.terms.in_turn = self.in_turn
                    self._tell(self.terms.counted_first, node)
                return self._average(made)
        self._refuse_unknown(node)
        if node in self.totals and not self._is_normalised(node):
            self._tell(self.terms.added, node)
            return node  # totals of parts add up, whatever they are of
        self._tell(self.terms.inexact, node)
        return self._average(node)

    def _is_normalised(self, total: fx.Node) -> bool:
        """Return whether what is added up has weights that sum to one over each microbatch: the sum is then a mean."""
        for node in walk([total], operands, into=lambda n: n in self.on_batch and self.kinds[n].name == UNKNOWN):
            below = node.args[1] if node.target in DIVISIONS else None
            if node.target in SOFTMAXES or (isinstance(below, fx.Node) and self._is_sum(below)):
                return True
        return False

    def _refuse_unknown(self, node: fx.Node) -> None:
        """Raise PlanError for the result of an op without a rule: it need not be a sum or mean of the microbatches'."""
        op = node.args[0] if node.target is getitem else node
        if isinstance(op, fx.Node) and op in self.on_batch and mixing.is_unknown(op):
            raise PlanError(
                f"the loss of a microbatch comes from {op.target}, an op without a rule: the loss of the global batch "
                "may be another function of them than their sum or mean",
                where=where_of(op),
                fix="compute it with ops of PyTorch that have rules, let the op return a value for each row and sum "
                "these, or keep one microbatch (batch.micro = batch.global, dp: 1)",
            )

    def _refuse_other_size(self, node: fx.Node) -> None:
        """Raise PlanError if the mean over microbatches is of another size than the value: a sum over the batch that is
        divided by a number that is no count of it.
        """
        if node.target in DIVISIONS and not self.in_turn:
            above, below = (n if isinstance(n, fx.Node) else None for n in node.args[:2])
            if above is not None and below is not None and self._is_sum(above) and below in self.on_batch:
                raise _other_size(node, "divides a sum over the batch by a number that is not a count over the batch")

    def _is_sum(self, node: fx.Node) -> bool:
        """Return whether a value over the batch is a sum and no mean."""
        if self.kinds[node].name != SHARE:
            return False
        reads_rows = any(self.kinds[n].name == ROWS for n in node.all_input_nodes)
        return reads_rows and not is_mean(node)

    def _cross_entropy(self, node: fx.Node) -> fx.Node:
        """The share of a cross-entropy. A mean over labels that are computed, or are probabilities, is averaged."""
        if arguments(node).get("reduction", MEAN) != MEAN:
            return node
        if not counts_labels(node, self.program):
            return self._average(node)
        return over_all_labels(node, self.counts, self._emit)


def _captured(recapture: Recapture | None, times: int) -> tuple[Program, int] | None:
    """Return the second capture; None if the model does not run with so many sequences."""
    if recapture is None:
        return None
    try:
        return recapture(times), times
    except PlanError:
        return None


def _other_size(node: fx.Node, does: str) -> PlanError:
    return PlanError(
        f"the loss {does}: its mean over microbatches would differ from the loss of the global batch",
        where=where_of(node),
        fix="divide the sum over all tokens by a count of the labels, such as mask.sum(); or keep one microbatch "
        "(batch.micro = batch.global, dp: 1)",
    )
