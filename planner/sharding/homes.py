"""The home rank of each matrix that is updated whole (muon): its parts are gathered there, updated, and sent back.

    parts of the update on the ranks that share it (shards of ZeRO-1, over tp or etp)
        -- all-to-all -->   home: the matrix, its update   -- all-to-all -->   the same parts

For even work, each matrix, the largest first, gets the rank with the least work as its home.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from passes.parameters import LocalParameter
from planner.mesh import Mesh
from planner.sharding.boxes import Box, Piece, part_of, pieces_of_run
from planner.sharding.buffers import Buffer, OptimizerPlan
from planner.updates import UpdateRules

SENT_BYTES = 2  # bytes of an element: updates of matrices are computed in bfloat16
_GROUPS = {("tp", "dp"): "tp-dp", ("tp", "dp-cp"): "tp-dp-cp", ("etp", "edp"): "etp-edp"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of ``shape`` (a, b): ``boxes`` of the full weight ``fqn``, concatenated along ``dim`` (0 or 1)."""

    fqn: str
    shape: tuple[int, int]
    dim: int
    boxes: tuple[Box, ...]

    @property
    def work(self) -> int:
        """Multiplications of one iteration of Newton-Schulz on [a, b], a ≤ b: a²b + a³ + a²b."""
        a, b = sorted(self.shape)
        return a * a * (2 * b + a)

    def place_of(self, index: int, within: Box) -> tuple[slice, slice]:
        """Return the slices in the matrix of ``within``, a part of box ``index``."""
        box = self.boxes[index]
        offset = sum(b.shape[-2 + self.dim] for b in self.boxes[:index])
        slices = list(within.slices_in(box)[-2:])
        along = slices[self.dim]
        slices[self.dim] = slice(along.start + offset, along.stop + offset)
        return slices[0], slices[1]


@dataclass(frozen=True, slots=True)
class Homed:
    """``home``: the index of a rank in the group that shares the matrix."""

    matrix: Matrix
    home: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A part of a matrix that a rank sends: slices ``inner`` of elements [``start``, ``stop``) of its shard of a bucket
    in ``shape``, which are ``place`` in matrix ``index`` of the bucket.
    """

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    place: tuple[slice, slice]

    @property
    def num_elements(self) -> int:
        rows, columns = self.place
        return (rows.stop - rows.start) * (columns.stop - columns.start)


@dataclass(frozen=True)
class MatrixHomes:
    """The matrices of one buffer, by bucket. ``axis``: of the ``num_ranks`` ranks that share them; "" for one rank."""

    buffer: Buffer
    axis: str
    num_ranks: int
    buckets: tuple[tuple[Homed, ...], ...]

    @property
    def update_bytes(self) -> int:
        """Maximum bytes of an update beside the buffers: on a home rank, four copies of the matrices of one bucket
        (received, updated, sent), those of the next bucket, and the products of one iteration.
        """
        found = 0
        for bucket in self.buckets:
            held = [0] * self.num_ranks
            for homed in bucket:
                held[homed.home] += prod(homed.matrix.shape)
            least = max((min(h.matrix.shape) for h in bucket), default=0)
            found = max(found, 5 * SENT_BYTES * max(held) + 3 * SENT_BYTES * least**2)
        return found

    def sent(
        self, bucket: int, mesh: Mesh, place: Mapping[str, int], homes: Sequence[int] | None = None
    ) -> Iterator[Sent]:
        """Yield the parts of matrices that the rank at ``place`` holds in its shard of a bucket, in a fixed order.

        ``homes``: only of matrices with these home ranks; default: all.
        """
        layout = self.buffer.layout
        of_bucket = layout.buckets[bucket]
        rank = place[self.buffer.reduced_over] if layout.num_ranks > 1 else 0
        owned = of_bucket.owned_ranges(rank, layout.num_ranks)
        for index, homed in enumerate(self.buckets[bucket]):
            matrix = homed.matrix
            if matrix.fqn not in owned or (homes is not None and homed.home not in homes):
                continue
            run, local = owned[matrix.fqn], self.buffer.by_name[matrix.fqn]
            part = part_of(local, mesh, place)
            for piece in pieces_of_run(part, local.global_shape, local.shape, run.param.start, run.param.stop):
                yield from _of_piece(index, matrix, piece, run.local.start)


def _of_piece(index: int, matrix: Matrix, piece: Piece, start: int) -> Iterator[Sent]:
    for number, box in enumerate(matrix.boxes):
        within = box.intersection(piece.box)
        if within is None:
            continue
        outer = piece.inner.slices_in(piece.outer)
        inner = tuple(
            slice(o.start + i.start, o.start + i.stop) for o, i in zip(outer, within.slices_in(piece.box), strict=True)
        )
        first = start + piece.first
        stop = first + piece.outer.num_elements
        yield Sent(index, first, stop, piece.outer.shape, inner, matrix.place_of(number, within))


def exchanged_elements(homes: MatrixHomes, bucket: int, mesh: Mesh, pp_rank: int) -> tuple[int, int]:
    """Return the elements that the fullest rank sends to homes, and those that the fullest home sends back."""
    if any(homes.buffer.by_name[homed.matrix.fqn].placement.has_whole_segment for homed in homes.buckets[bucket]):
        return _of_all_ranks(homes, bucket, mesh, pp_rank)
    layout, held = homes.buffer.layout, [0] * homes.num_ranks
    for homed in homes.buckets[bucket]:
        held[homed.home] += prod(homed.matrix.shape)
    owned = (layout.buckets[bucket].owned_ranges(rank, layout.num_ranks) for rank in range(layout.num_ranks))
    return max(sum(len(r.param) for r in ranges.values()) for ranges in owned), max(held)


def _of_all_ranks(homes: MatrixHomes, bucket: int, mesh: Mesh, pp_rank: int) -> tuple[int, int]:
    """Count the same piece by piece, because every rank that holds a replicated segment sends it."""
    first = mesh.rank_of(pp=pp_rank)
    ranks = next(r for r in mesh.groups_over(homes.axis) if first in r)
    most, held = 0, [0] * len(ranks)
    for rank in ranks:
        sent = list(homes.sent(bucket, mesh, {**mesh.place(rank), "ep": 0}))
        most = max(most, sum(s.num_elements for s in sent))
        for s in sent:
            held[homes.buckets[bucket][s.index].home] += s.num_elements
    return most, max(held)


def combined_axes(optimizer: OptimizerPlan) -> tuple[str, ...]:
    """Return the matrix axes that combine several axes, and therefore need process groups of their own."""
    return tuple(sorted({buffer.matrix_axis for buffer in optimizer.buffers} & set(_GROUPS.values())))


def homes_of(buffer: Buffer, mesh: Mesh, rules: UpdateRules, ep_rank: int = 0) -> MatrixHomes | None:
    """Choose the home rank of each matrix of a buffer; None for a buffer that is updated element by element."""
    if buffer.is_frozen or rules.matrices_of(buffer.parameters[0].fqn) is None:
        return None
    axis = shared_over(buffer.parameters[0], mesh, sharded=buffer.layout.num_ranks > 1)
    num_ranks = mesh.size(axis) if axis else 1
    by_bucket = [
        [m for slot in bucket.slots for m in matrices_of(buffer.by_name[slot.name], rules, mesh, ep_rank)]
        for bucket in buffer.layout.buckets
    ]
    homes = iter(_even([matrix.work for bucket in by_bucket for matrix in bucket], num_ranks))
    homed = tuple(tuple(Homed(matrix, next(homes)) for matrix in bucket) for bucket in by_bucket)
    return MatrixHomes(buffer, axis, num_ranks, homed)


def _even(work: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each amount of work: the largest first, to the rank with the least so far."""
    homes, loads = [0] * len(work), [0] * num_ranks
    for number in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        homes[number] = home = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        loads[home] += work[number]
    return homes


def shared_over(local: LocalParameter, mesh: Mesh, *, sharded: bool) -> str:
    """Return the axes of more than one rank that share the matrices of a parameter. ``sharded``: dp too (ZeRO-1)."""
    cut = local.axis if local.placement.is_sharded and mesh.size(local.axis) > 1 else ""
    shared = local.reduced_over if sharded and mesh.size(local.reduced_over) > 1 else ""
    return _GROUPS[cut, shared] if cut and shared else cut or shared


def matrices_of(local: LocalParameter, rules: UpdateRules, mesh: Mesh, ep_rank: int = 0) -> Iterator[Matrix]:
    """Yield the matrices of a parameter on the ranks of one ep rank; none if it is updated element by element."""
    matrices = rules.matrices_of(local.fqn)
    if matrices is None:
        return
    shape, dim = local.global_shape, matrices.dim
    leading = [range(n) for n in shape[:-2]]
    if local.expert is not None and local.expert.dim >= 0:
        first = local.expert.first(mesh.ep, ep_rank)
        leading[local.expert.dim] = range(first, first + local.expert.num_experts // mesh.ep)
    for place in product(*leading):
        for index, size in enumerate(matrices.sizes):
            boxes = []
            for a, b in matrices.ranges(index):
                start, stop = [*place, 0, 0], [*(i + 1 for i in place), *shape[-2:]]
                start[dim], stop[dim] = a, b
                boxes.append(Box(tuple(start), tuple(stop)))
            of_dim = dim - (len(shape) - 2)
            sides = list(shape[-2:])
            sides[of_dim] = size * matrices.repeats
            yield Matrix(local.fqn, (sides[0], sides[1]), of_dim, tuple(boxes))
