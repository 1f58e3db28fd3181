"""Ops that read sequences by their places in the batch: in a microbatch other sequences have these places.

    x.view(b·h, t, d) * y.repeat(h, 1, 1)       of x every h rows are one sequence, of y every b-th row is
    x + y.transpose(0, 1).reshape(b, t, d)      each sequence beside parts of all
    x[0], x[:, :1] of [t, b, d]                 some sequences, unless cuts of x cover all
    x * arange(b)[:, None]                      a constant with another value for each sequence

Only where it is certain which rows of which dim are those of a sequence (passes.partition.batch.mixing.batch_runs).

Ops that read or write rows at places which an index names, too: whether every row stays with its own sequence.

    x[arange(n), last]                       each sequence its own              apart
    rows[arange(b)[:, None] · s + place]     a place within its own sequence    apart
    zeros(n, h).index_add(0, arange(n), y)   each row to its own place          apart
    x[order], zeros(c, h).index_add(0, classes, y), zeros(c, h).index_put([classes], y)      across sequences

A table may have as many rows as are added to it, or as the batch has: only the numbers of the index show that a row
comes to its own place. They are known if they are constants, or constants plus a place that a sequence computes.
Rows that are sorted and come back in order are followed elsewhere (passes.partition.batch.restored_orders).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.partition.loss.kinds import tile
from passes.program.known_values import value_of
from passes.program.ops.aten import aten, cut_of, dim_of_cat, has_floats, is_pointwise, named, packet_of, shape_of
from passes.program.ops.groups import ADDING, JOINS, LOOKUPS, PLACING, RESHAPES, SAME
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


# ---- rows at places that an index names

Held = Sequence[Collection[int]]  # the dims of each operand that hold the batch


def addresses(node: fx.Node) -> bool:
    """Return whether an op reads or writes rows at places that an index names."""
    return node.target in LOOKUPS or node.target in PLACING or packet_of(node.target) in (aten.embedding, aten.take)


def crosses(node: fx.Node, held: Held) -> bool:
    """Return whether a call that ``addresses`` rows reads or writes rows of other sequences, or is not shown not to."""
    table, *read = operands_of(node)
    dims, holds = _addressed(node), dict(zip((table, *read), held, strict=True))
    of_batch = [dim for dim in dims if dim in held[0]]
    if node.target in PLACING and not of_batch:
        along = any(True for _ in _runs_along(node, holds))
        return along and not _is_count(node, holds) and not any(_is_own(node, dim, holds) for dim in dims)
    return not all(_is_own(node, dim, holds) for dim in of_batch)


def _addressed(node: fx.Node) -> dict[int, Any]:
    """Map each dim of the table to the index of the places along it."""
    given, ndim = named(node), max(1, len(shape_of(operands_of(node)[0])))
    if "indices" in given and packet_of(node.target) is not aten.embedding:
        indices: Any = given["indices"]
        return {dim: index for dim, index in enumerate(indices) if index is not None}
    index = given["index"] if "index" in given else given["indices"]
    if packet_of(node.target) is aten.take:
        return dict.fromkeys(range(ndim), index)
    return {int(given.get("dim", 0)) % ndim: index}


def _runs_along(node: fx.Node, holds: dict[fx.Node, Collection[int]]) -> Iterator[tuple[fx.Node, int]]:
    """(operand, dim counted from the last one of the places) of sequences among the rows that are read or written."""
    addressed = _addressed(node)
    indices, inner = dict.fromkeys(addressed.values()), len(shape_of(operands_of(node)[0])) - max(addressed) - 1
    num_places = max(len(shape_of(index)) for index in indices)  # dims of the indices together
    by_dim = "dim" in named(node) and len(shape_of(next(iter(indices)))) == len(shape_of(node))
    only = int(named(node)["dim"]) % max(1, len(shape_of(node))) if "dim" in named(node) else None
    for index in indices:
        yield from ((index, d - len(shape_of(index))) for d in holds.get(index, ()) if not by_dim or d == only)
    rows = _source(node)
    if rows is not None and rows in holds:
        ndim = len(shape_of(rows))
        for dim in holds[rows]:
            place = dim - ndim if by_dim else dim - ndim + inner
            if (dim == only) if only is not None else -num_places <= place < 0:
                yield rows, place if only is None or by_dim else -1


def _source(node: fx.Node) -> fx.Node | None:
    """Return the rows that are written."""
    given: dict[str, Any] = named(node)
    rows = next((given[name] for name in ("src", "source", "values") if name in given), None)
    return rows if isinstance(rows, fx.Node) else None


def _is_count(node: fx.Node, holds: dict[fx.Node, Collection[int]]) -> bool:
    """Return whether rows are counted that are not of the batch: counts of experts' tokens are followed elsewhere."""
    rows, given = _source(node), named(node)
    is_added = node.target in ADDING or bool(given.get("accumulate"))
    if not is_added or rows is None:
        return is_added
    is_of_batch = any(operand is rows for operand, _ in _runs_along(node, holds)) and has_floats(rows)
    return not rows.meta.get("grad") and not is_of_batch


# ---- the numbers of an index


def _is_own(node: fx.Node, dim: int, holds: dict[fx.Node, Collection[int]]) -> bool:
    """Return whether the places along a dim of the table are those of the row's own sequence."""
    if packet_of(node.target) is aten.take:
        return False
    size = shape_of(operands_of(node)[0])[dim]
    along = names_own_rows(_addressed(node)[dim], size)
    return along is not None and all(place == along for _, place in _runs_along(node, holds))


def names_own_rows(index: fx.Node, size: int) -> int | None:
    """Return the dim, counted from the last, along which ``index`` is 0 … size − 1, or begins a part of these for each
    sequence; None if it is not known to be."""
    value = value_of(index, index.graph.owning_module, {})
    if value is not None:
        return _counts_along(value, size, 1)
    while index.target in SAME:
        index = index.all_input_nodes[0]
    if index.target in RESHAPES:
        source = index.all_input_nodes[0]
        found = names_own_rows(source, size)
        is_outer = found is not None and not any(n > 1 for n in shape_of(source)[:found])
        return -len(shape_of(index)) if is_outer and len(shape_of(index)) == 1 else None
    if packet_of(index.target) is not aten.add or len(index.all_input_nodes) != 2 or named(index).get("alpha", 1) != 1:
        return None
    values = [value_of(n, n.graph.owning_module, {}) for n in index.all_input_nodes]
    starts = [value for value in values if value is not None]
    return _counts_along(starts[0], size, None) if len(starts) == 1 else None


def _counts_along(value: torch.Tensor, size: int, step: int | None) -> int | None:
    """Return the dim along which it counts 0, step, 2 · step … up to ``size``; ``step`` None: as it has so many."""
    for dim, count in enumerate(value.shape):
        by = size // count if step is None and count > 1 and size % count == 0 else step
        numbers = torch.arange(count).mul(by or 0).view(*[-1 if d == dim else 1 for d in range(value.dim())])
        if by and by * count == size and torch.equal(value.long(), numbers.expand(value.shape)):
            return dim - value.dim()
    return None
