"""Ops that read sequences by their places in the batch: in a microbatch other sequences have these places.

    x.view(b·h, t, d) * y.repeat(h, 1, 1)       of x every h rows are one sequence, of y every b-th row is
    x + y.transpose(0, 1).reshape(b, t, d)      each sequence beside parts of all
    x[0], x[:, :1] of [t, b, d]                 some sequences, unless cuts of x cover all
    x * arange(b)[:, None]                      a constant with another value for each sequence

Only where it is certain which rows of which dim are those of a sequence (passes.partition.batch.mixing.batch_runs).
"""

from collections.abc import Collection, Iterator, Mapping
from operator import getitem

from torch import fx

from passes.partition.loss.kinds import tile
from passes.program.known_values import value_of
from passes.program.ops.aten import cut_of, dim_of_cat, has_floats, is_pointwise, shape_of
from passes.program.ops.groups import JOINS, LOOKUPS, PLACING, RESHAPES
from passes.program.program import Program
from passes.program.walks import readers, walk
from passes.rules.rule import RESULT, operands_of
from passes.rules.table import rule_of
from passes.types.types import Run

Runs = Mapping[fx.Node, frozenset[Run] | None]
PLACES = LOOKUPS | PLACING
MAX_ELEMENTS = 1 << 22  # of a constant that is looked at


def batch_size(program: Program) -> int:
    return next((n.meta["val"].shape[0] for n in program.graph.graph.nodes if n.name in program.inputs), 1)


class Orders:
    """Facts of a capture of two sequences or more. ``on_batch``: nodes made of the batch, with their ``runs``."""

    def __init__(self, program: Program, on_batch: Collection[fx.Node], runs: Runs) -> None:
        self.program, self.on_batch, self.runs, self.size = program, on_batch, runs, batch_size(program)

    def several(self) -> list[fx.Node]:
        """Return nodes that read two orders of the batch on one dim."""
        return [n for n in self.program.graph.graph.nodes if n in self.on_batch and self._reads_two(n)]

    def by_place(self, inner: Collection[fx.Node]) -> list[fx.Node]:
        """Return those of ``inner`` that read sequences beside parts of others, some alone, or their numbers."""
        cuts = self._cuts()
        ways = self._reads_parts, self._reads_numbers, self._loses, self._joins_others
        return [n for n in inner if n in cuts or any(way(n) for way in ways)]

    def _reads_two(self, node: fx.Node) -> bool:
        """Return whether operands that hold the sequences on one factor of the call have them in two orders."""
        steps = {step for n in node.all_input_nodes for _, step, _ in self.runs.get(n) or ()}
        rule = rule_of(node) if node.op == "call_function" and len(steps) > 1 else None
        read = operands_of(node) if rule is not None else ()
        found = {(i, *run) for i, operand in enumerate(read) for run in self._certain(operand)}
        orders = {(rule.sole(i, dim), step) for i, dim, step in found} if rule is not None else set()
        factors = [factor for factor, _ in orders if factor is not None]
        return len(factors) > len(set(factors))

    def _reads_parts(self, node: fx.Node) -> bool:
        """Return whether the operands of an op by elements have the sequences on different dims of the result."""
        read = operands_of(node) if node.op == "call_function" and is_pointwise(node.target) else ()
        found = {dim - len(shape_of(n)) for n in read for dim, _ in self._certain(n)}
        return len(found) > 1

    def _certain(self, operand: fx.Node) -> Iterator[tuple[int, int]]:
        """Yield (dim, distance of two sequences) if all sequences are on one dim, evenly."""
        found = self.runs.get(operand) or frozenset()
        if len(found) == 1:
            ((dim, step, count),) = found
            if count == self.size and shape_of(operand)[dim] % (step * count) == 0:
                yield dim, step

    def _cuts(self) -> set[fx.Node]:
        """Return cuts along the batch that do not cover all of it together."""
        found: dict[tuple[fx.Node, int], list[tuple[fx.Node, tuple[int, int]]]] = {}
        for node in self.program.graph.graph.nodes:
            cut = cut_of(node) if node.op == "call_function" else None
            if cut is not None and any(dim == cut[1] for dim, _ in self._certain(cut[0])):
                call = node.all_input_nodes[0] if node.target is getitem else node
                found.setdefault(cut[:2], []).append((call, cut[2:]))
        ends = {key: shape_of(key[0])[key[1]] for key in found}
        whole = {key for key, cuts in found.items() if tile(sorted({span for _, span in cuts}), ends[key])}
        return {call for key, cuts in found.items() if key not in whole for call, _ in cuts}

    def _loses(self, node: fx.Node) -> bool:
        """Return whether a reshape puts parts of sequences between parts of others."""
        is_reshape = node.op == "call_function" and node.target in RESHAPES
        return is_reshape and any(self._certain(node.all_input_nodes[0])) and not any(self._certain(node))

    def _joins_others(self, node: fx.Node) -> bool:
        """Return whether cuts along the batch are joined along it in another order."""
        cuts = [cut_of(n) for n in node.all_input_nodes] if node.target in JOINS else []
        known = [cut for cut in cuts if cut is not None and any(dim == cut[1] for dim, _ in self._certain(cut[0]))]
        starts = [start for _, dim, start, _ in known if dim == dim_of_cat(node)]
        return len(known) == len(cuts) and len({source for source, *_ in known}) == 1 and starts != sorted(starts)

    def _reads_numbers(self, node: fx.Node) -> bool:
        """Whether a constant beside the batch differs from sequence to sequence; as a part of an index it may."""
        read = operands_of(node) if node.op == "call_function" else ()
        held = [(i, dim, step) for i, n in enumerate(read) for dim, step in self._certain(n)]
        rule = rule_of(node) if held and any(n not in self.on_batch for n in read) else None
        for i, dim, step in held if rule is not None else ():
            factor = rule.sole(i, dim) if rule is not None else None
            for place in factor.places if factor is not None else ():
                is_beside = place.operand != RESULT and read[place.operand] not in self.on_batch
                if is_beside and self._differs(read[place.operand], place.dim, step) and not _is_index(node):
                    return True
        return False

    def _differs(self, constant: fx.Node, dim: int, step: int) -> bool:
        value = constant.meta.get("val")
        if value is None or value.numel() > MAX_ELEMENTS or value.shape[dim] % (step * self.size):
            return False
        known = value_of(constant, constant.graph.owning_module, {})
        if known is None:
            return False
        rows = known.unflatten(dim, (-1, self.size, step))
        return not bool((rows == rows.narrow(dim + 1, 0, 1)).all())


def _is_index(node: fx.Node) -> bool:
    """Return whether integers end as places in a table alone."""
    made = list(walk([node], readers, stop=lambda n: n.target in PLACES or has_floats(n)))
    return all(n.target in PLACES or not has_floats(n) for n in made) and any(n.target in PLACES for n in made)
