"""Sums over whole parameters, from all their parts, for a rule that reads means of rows and columns (adafactor).

    squares of a rank's gradients, along rows and columns   -- all-reduce over each axis -->   of the parameter
    squares of its weights, and of their updates            -- all-reduce over each axis -->   its two sizes

The axes are those over which a parameter's elements lie: tp or etp where it is sharded, and that of ZeRO's shards. Each
element counts once. A rank of ep keeps the rows and columns of its own experts; the sizes are of a whole stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from passes.parameters import LocalParameter
from planner.mesh import SHARD, Mesh
from planner.sharding.boxes import Box, pieces_of_run
from planner.sharding.buckets import Bucket
from planner.sharding.buffers import Buffer, num_statistics
from planner.sharding.parts import part_of
from planner.spec.update_rules import FACTORED_RULES

AXES = ("tp", "etp", "dp", "dp-cp", SHARD, "edp", "ep")  # in this order, which all ranks share
SUM_BYTES = 8  # sums are float64


@dataclass(frozen=True, slots=True)
class Factored:
    """A parameter, and the axes over which its sums are partial.

    ``whole``: the box of the full tensor that has statistics on this rank: all of it, or of a stack the experts of an
    ep rank. ``row_axes``: of the sums along rows and columns; ``size_axes``: of the two sizes.
    """

    local: LocalParameter
    whole: Box
    row_axes: tuple[str, ...]
    size_axes: tuple[str, ...]

    @property
    def boxes(self) -> tuple[Box, Box]:
        """Of its rows in [.., a, 1], and of its columns in [.., 1, b], for a parameter [.., a, b]."""
        start, stop = self.whole.start, self.whole.stop
        rows = Box((*start[:-1], 0), (*stop[:-1], 1))
        return rows, Box((*start[:-2], 0, start[-1]), (*stop[:-2], 1, stop[-1]))

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns; else it keeps a moment of each element."""
        return len(self.local.global_shape) > 1

    @property
    def num_statistics(self) -> int:
        """Of its rows and columns."""
        return num_statistics(self.local)


@dataclass(frozen=True, slots=True)
class FactoredPart:
    """Elements ``start`` to ``stop`` of a rank's shard of a bucket, with a ``shape`` and ``inner`` slices in it, which
    are ``place`` of the box ``whole``. ``is_counted``: no earlier rank has the same elements in its sums.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    place: tuple[slice, ...]
    is_counted: bool


def factored_of(buffers: Iterable[Buffer], mesh: Mesh, ep_rank: int = 0) -> tuple[Factored, ...]:
    """The parameters of a rank with such a rule, in the order of its buffers."""
    return tuple(
        factored_of_one(buffer.by_name[slot.name], mesh, ep_rank, is_sharded=buffer.layout.num_ranks > 1)
        for buffer in buffers
        if buffer.rule in FACTORED_RULES
        for slot in buffer.layout.slots
    )


def factored_of_one(local: LocalParameter, mesh: Mesh, ep_rank: int = 0, *, is_sharded: bool) -> Factored:
    """``is_sharded``: whether ranks that run other tokens hold shards of it (ZeRO)."""
    shape, expert = local.global_shape, local.expert
    cut = {local.axis} if local.placement.is_sharded else set()
    axes = cut | ({local.reduced_over} if is_sharded else set())
    is_stack = expert is not None and expert.dim >= 0
    whole = Box(tuple(0 for _ in shape), tuple(shape))
    row_axes = set(axes)
    if expert is not None and is_stack and expert.dim < len(shape) - 2:
        first = expert.first(mesh.ep, ep_rank)
        start, stop = list(whole.start), list(whole.stop)
        start[expert.dim], stop[expert.dim] = first, first + expert.num_experts // mesh.ep
        whole = Box(tuple(start), tuple(stop))
    elif is_stack:  # experts are the rows or the columns
        row_axes.add("ep")
    return Factored(local, whole, _ordered(row_axes, mesh), _ordered(axes | ({"ep"} if is_stack else set()), mesh))


def _ordered(axes: set[str], mesh: Mesh) -> tuple[str, ...]:
    """Those of several ranks."""
    return tuple(axis for axis in AXES if axis in axes and mesh.size(axis) > 1)


def all_reduces(factored: Sequence[Factored], *, of_sizes: bool) -> Iterator[tuple[str, list[int]]]:
    """(axis, numbers of the parameters with sums in it), in the order of the calls.

    Tied parameters have calls of their own: so every stage that holds one adds the same numbers in the same order.
    """
    for axis in AXES:
        for tied in sorted({f.local.tied_stages for f in factored}):
            of_call = [number for number, f in enumerate(factored) if f.local.tied_stages == tied]
            members = [n for n in of_call if axis in (factored[n].size_axes if of_sizes else factored[n].row_axes)]
            members = [n for n in members if of_sizes or factored[n].is_matrix]
            if members:
                yield axis, members


def update_bytes(factored: Sequence[Factored], buffers: Iterable[Buffer]) -> int:
    """The most that an update holds beside buffers and state: sums, packed and unpacked, and three values of each
    element of the largest part.
    """
    sums = SUM_BYTES * sum(f.num_statistics + 2 for f in factored)
    sizes = {b: [prod(p.shape) for p in b.parameters] for b in buffers if b.rule in FACTORED_RULES}
    largest = max((min(max(n), b.layout.shard_elements()) * b.main_dtype.itemsize for b, n in sizes.items()), default=0)
    return 2 * sums + 3 * largest


def parts_of(
    factored: Factored, bucket: Bucket, buffer: Buffer, mesh: Mesh, place: Mapping[str, int]
) -> Iterator[FactoredPart]:
    """The elements of a parameter in the shard of the rank at ``place``; none of padding."""
    local, num_ranks = factored.local, buffer.layout.num_ranks
    run = bucket.owned_ranges(place[buffer.reduced_over] if num_ranks > 1 else 0, num_ranks).get(local.fqn)
    if run is None:
        return
    pieces = pieces_of_run(
        part_of(local, mesh, place), local.global_shape, local.shape, run.param.start, run.param.stop
    )
    for piece in pieces:
        start = run.local.start + piece.first
        yield FactoredPart(
            start,
            start + piece.outer.num_elements,
            piece.outer.shape,
            piece.inner.slices_in(piece.outer),
            piece.box.slices_in(factored.whole),
            not (piece.is_shared and place[local.axis]),
        )
