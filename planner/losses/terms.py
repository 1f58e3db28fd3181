"""Make the loss of a microbatch its share of the loss of the global batch, so that shares simply add up.

A model writes a mean over its batch. Over microbatches and data-parallel ranks the mean of means is wrong as soon as
they hold different numbers of valid tokens. So what a model computes over its batch takes the value that it has over
the global batch, of n microbatches:

    cross_entropy(mean)       → cross_entropy(sum) / Σ over the global batch of (targets ≠ ignore_index)
    mask.sum(), mask.mean()   → their value over the global batch, wherever they are read (planner.losses.counts)
    8, where 8 is the batch   → 8 · n                                                      (planner.losses.batch_dims)
    sum over the batch        → itself: shares are sums
    mean over the batch       → itself / n     (equal sizes: exact)
    what reads no batch       → itself / n     (a penalty on weights counts once)
    a + b, a·c, −a, casts     → term by term
    anything else             → itself / n, and a warning that names the line

What mixes the sequences of a batch before the loss (planner.losses.batch_mixing) is told too: no share
mends it.

Leaves:  a graph with one placeholder for each count, and a second graph that computes the counts of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from planner.errors import PlanError
from planner.losses.batch_dims import BatchDims, compare_captures, is_number
from planner.losses.batch_mixing import mixing_nodes
from planner.losses.counts import AVERAGES, SUMS, Counts, LossTerms, ancestors, reduced_dims, reduces_batch
from planner.program import Program
from planner.source_lines import where_of

__all__ = ["LossTerms", "share_loss"]

aten = torch.ops.aten

MEAN, SUM = 1, 2
PASS_THROUGH = {aten.to.dtype, aten.reshape.default, aten.clone.default, aten.contiguous.default, aten.neg.default}
SCALED = {aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
ADDED = {aten.add.Tensor, aten.sub.Tensor}
TAIL = PASS_THROUGH | SCALED | ADDED | SUMS | AVERAGES
OVER_ROWS = {aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
             aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.kl_div.default}


def share_loss(program: Program, num_microbatches: int, recapture: Callable[[], Program] | None = None) -> LossTerms:
    """Rewrite ``program``'s loss in place; ``num_microbatches`` counts those of the whole global batch (all dp ranks).

    ``recapture`` gives the program of twice as many sequences, for a loss that leaves in doubt what counts them.
    """
    terms = LossTerms()
    counts = Counts(program, terms)
    if num_microbatches > 1:
        counts.globalise(num_microbatches)
    rewriter = _Rewriter(program, num_microbatches, counts, recapture)
    rewriter.scale_numbers()
    rewriter.warn_of_statistics()
    rewriter.warn_of_mixing()
    share = rewriter.share(program.node(program.loss))
    program.graph.graph.output_node().args = ((share,),)
    program.loss = share.name
    counts.finish()
    program.graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.graph.recompile()
    program.__dict__.pop("_nodes", None)
    return terms


class _Rewriter:
    """Owns what is known of the batch: which nodes read it, and once it was needed, where it stands in them."""

    def __init__(self, program: Program, num_microbatches: int, counts: Counts,
                 recapture: Callable[[], Program] | None) -> None:
        self.program, self.total, self.counts = program, num_microbatches, counts
        self.graph = program.graph.graph
        self.recapture = recapture
        self._batch_dims: BatchDims | None = None
        self.on_batch: set[fx.Node] = set()
        for node in self.graph.nodes:
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        if node.name in self.program.inputs or any(n in self.on_batch for n in node.all_input_nodes):
            self.on_batch.add(node)

    # ---- the loss, from its end upwards

    def share(self, node: fx.Node) -> fx.Node:
        """A node whose values over the microbatches add up to ``node`` over the global batch."""
        target = node.target
        if self.total == 1 and target is not aten.cross_entropy_loss.default:
            return node
        if node not in self.on_batch:
            return self._average(node)
        if target is aten.cross_entropy_loss.default or target is aten.nll_loss_nd.default:
            return self._cross_entropy(node)
        if target in PASS_THROUGH:
            return self._again(node, [self.share(self._input(node, 0)), *node.args[1:]])
        if target in ADDED and not node.kwargs:
            parts: Any = node.args
            return self._again(node, [self.share(a) if isinstance(a, fx.Node) else a / self.total for a in parts])
        if target in SUMS | AVERAGES:
            return self._reduced(node)
        if target in SCALED:
            return self._scaled(node)
        if target in OVER_ROWS:
            return node if _reduction(node) == SUM else self._average(node)
        return self._inexact(node)

    def _input(self, node: fx.Node, position: int) -> fx.Node:
        value = node.args[position]
        assert isinstance(value, fx.Node)
        return value

    def _again(self, node: fx.Node, args: list[Any]) -> fx.Node:
        return node if list(node.args) == args else self._emit(node, node.target, args, dict(node.kwargs))

    def _emit(self, like: fx.Node, target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            new = self.graph.call_function(target, tuple(args), kwargs or {})
        new.meta = dict(like.meta)
        self._note(new)
        return new

    def _average(self, node: fx.Node) -> fx.Node:
        return node if self.total == 1 else self._emit(node, aten.div.Tensor, [node, self.total])

    def _inexact(self, node: fx.Node) -> fx.Node:
        self.counts.terms.inexact.append((str(node.target), where_of(node)))
        return self._average(node)

    def _scaled(self, node: fx.Node) -> fx.Node:
        """a·b or a/b where all but one factor is the same for every microbatch."""
        a, b = node.args[0], node.args[1]
        if isinstance(a, fx.Node) and b not in self.on_batch:
            return self._again(node, [self.share(a), b])
        if node.target is aten.mul.Tensor and isinstance(b, fx.Node) and a not in self.on_batch:
            return self._again(node, [a, self.share(b)])
        return self._inexact(node)

    def _reduced(self, node: fx.Node) -> fx.Node:
        """A sum or mean: over the batch, or (where that was summed before) over what is left."""
        value = self._input(node, 0)
        done, where = reduced_dims(node), frozenset(range(value.meta["val"].dim()))
        if node.meta["val"].dim() or any(reduces_batch(n) for n in ancestors([value]) if n in self.on_batch):
            known = self._where_batch_stands()
            if known is None or value.name not in known.dims:
                return self._inexact(node)
            where = known.dims[value.name]
        if not where:
            return self._again(node, [self.share(value), *node.args[1:]])
        if not where <= done:
            return self._inexact(node)
        return node if node.target in SUMS else self._average(node)

    # ---- plain numbers

    def scale_numbers(self) -> None:
        """A number that counts sequences takes the count of the global batch."""
        tail = [n for n in self._tail() if n.target in SCALED]
        if self.total == 1 or not any(self._may_count(a) for n in tail for a in n.args):
            return
        known = self._where_batch_stands()
        for node in tail:
            for position, number in enumerate(node.args):
                power = known.powers.get((node.name, position), 0) if known is not None and is_number(number) else 0
                if power is None:
                    self.counts.terms.inexact.append((str(node.target), where_of(node)))
                elif power:
                    node.update_arg(position, number * self.total**power)  # pyright: ignore[reportOperatorIssue]

    def _tail(self) -> list[fx.Node]:
        """The loss, and upwards all that sums, means and products of it are made of."""
        seen: dict[fx.Node, None] = {}
        stack = [self.program.node(self.program.loss)]
        while stack:
            node = stack.pop()
            if node in self.on_batch and node.target in TAIL and node not in seen:
                seen[node] = None
                stack.extend(node.all_input_nodes)
        return list(seen)

    def _may_count(self, number: Any) -> bool:
        """Whether a plain number could be, or be one over, a multiple of the microbatch's size."""
        if not is_number(number) or number == 0:
            return False
        size = next((n.meta["val"].shape[0] for n in self.graph.nodes if n.name in self.program.inputs), 1)
        sizes = [c for c in (abs(number), 1 / abs(number)) if abs(c - round(c)) < 1e-6 * c]
        return any(round(c) > 1 and round(c) % size == 0 for c in sizes) or (size == 1 and abs(number) == 1)

    def _where_batch_stands(self) -> BatchDims | None:
        """By a second capture; None where that is not possible."""
        if self._batch_dims is None and self.recapture is not None:
            recapture, self.recapture = self.recapture, None
            try:
                self._batch_dims = compare_captures(self.graph, recapture().graph.graph)
            except PlanError:
                return None
        return self._batch_dims

    def warn_of_statistics(self) -> None:
        """Batch normalisation in training takes the statistics of what it is given: here of one microbatch."""
        for node in self.graph.nodes:
            if self.total > 1 and "batch_norm" in getattr(node.target, "_opname", "") and node in self.on_batch:
                names = [a.name for a in node.target._schema.arguments]
                if dict(zip(names, node.args, strict=False)).get("training", True):
                    self.counts.terms.inexact.append((str(node.target), where_of(node)))

    def warn_of_mixing(self) -> None:
        """What the sequences of a batch see of each other, those of a microbatch see of fewer."""
        if self.total > 1:
            found = mixing_nodes(self.graph, self.on_batch, set(self._tail()), self._where_batch_stands)
            self.counts.terms.mixed.extend((str(n.target), where_of(n)) for n in found)

    # ---- cross-entropy

    def _cross_entropy(self, node: fx.Node) -> fx.Node:
        names = ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        target, reduction = given["target"], given.get("reduction", MEAN)
        if reduction == SUM:
            return node
        if reduction != MEAN or not self.counts.from_inputs.get(target.name):
            return self._inexact(node)
        if target.meta["val"].is_floating_point():
            return self._average(node)
        count = self._valid_tokens(target, given.get("weight"), int(given.get("ignore_index", -100)))
        order = [given["self"], target, given.get("weight"), SUM, *[given[k] for k in names[4:] if k in given]]
        if "label_smoothing" in given and "ignore_index" not in given:
            order.insert(4, -100)
        total = self._emit(node, node.target, order)
        return self._emit(node, aten.div.Tensor, [total, self._denominator(count, node)])

    def _denominator(self, count: fx.Node, like: fx.Node) -> fx.Node:
        """Σ ``count`` over the global batch, in the dtype of ``like``."""
        dtype = like.meta["val"].dtype
        new = self._emit(like, aten.to.dtype, [self.counts.holder(count), dtype])
        new.meta["val"], new.meta["grad"] = torch.empty((), dtype=dtype, device="meta"), False
        return new

    def _valid_tokens(self, target: fx.Node, weight: fx.Node | None, ignore_index: int) -> fx.Node:
        """Σ (target ≠ ignore_index), or the sum of the valid tokens' class weights."""
        def emit(op: Any, args: list[Any], val: torch.Tensor) -> fx.Node:
            new = self._emit(target, op, args)
            new.meta["val"], new.meta["grad"] = val, False
            return new
        shape = target.meta["val"].shape
        valid = emit(aten.ne.Scalar, [target, ignore_index], torch.empty(shape, dtype=torch.bool, device="meta"))
        if weight is not None:
            safe = emit(aten.mul.Tensor, [target, valid], torch.empty(shape, dtype=torch.int64, device="meta"))
            each = emit(aten.index.Tensor, [weight, [safe]],
                        torch.empty(shape, dtype=weight.meta["val"].dtype, device="meta"))
            valid = emit(aten.mul.Tensor, [each, valid], each.meta["val"])
        return emit(aten.sum.default, [valid], torch.empty((), dtype=torch.int64, device="meta"))


def _reduction(node: fx.Node) -> int:
    """The reduction code of a loss op (0 none, 1 mean, 2 sum)."""
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return int(given.get("reduction", MEAN))
