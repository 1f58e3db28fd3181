"""Ops that read or write rows at places which an index names: whether every row stays with its own sequence.

    x[arange(n), last]                       each sequence its own              apart
    rows[arange(b)[:, None] · s + place]     a place within its own sequence    apart
    zeros(n, h).index_add(0, arange(n), y)   each row to its own place          apart
    x[order], zeros(c, h).index_add(0, classes, y), zeros(c, h).index_put([classes], y)      across sequences

A table may have as many rows as are added to it, or as the batch has: only the numbers of the index show that a row
comes to its own place. They are known if they are constants, or constants plus a place that a sequence computes.
Rows that are sorted and come back in order are followed elsewhere (passes.partition.batch.restored_orders).
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from passes.program.known_values import value_of
from passes.program.ops.aten import aten, has_floats, named, packet_of, shape_of
from passes.program.ops.groups import ADDING, LOOKUPS, PLACING, RESHAPES, SAME
from passes.rules.rule import operands_of

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
