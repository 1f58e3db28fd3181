"""The gradient buffers, memory and peak of one pp rank of a layout, from the parameters of its units.

A buffer is the sum of its padded parameters, and each bucket ends on a multiple (planner.sharding.buckets). The number
of buckets is estimated as total / bucket size, so a length is off by less than one such multiple per bucket.

planner.cost.memory computes the same rows for a plan; here they come from the parts of a cut (planner.cost.cut.parts).

peak of a rank       along its actions, until its memory stops growing
messages             those received for the next action, and those just sent
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest

from planner.cost.cut.units import CutWork, HeldParameter
from planner.cost.layout import Layout
from planner.cost.memory import Lasting
from planner.pipeline.actions import Order
from planner.pipeline.kinds import KINDS, Sizes
from planner.pipeline.ledger import Peak, StageBytes, peak
from planner.pipeline.links import received_by, sent_by
from planner.pipeline.schedule import build_schedule, rank_order
from planner.sharding.buckets import default_bucket_size, end_multiple, padded
from planner.sharding.buffers import gradient_size
from planner.spec.spec import Spec
from planner.spec.update_rules import moments_of

Held = Iterable[tuple[HeldParameter, int]]


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A gradient buffer of a rank: ``elements`` with padding; item sizes of its parameters, gradients and main copies.

    ``shard``: elements that this rank updates; ``tied``: its parameters are tied; ``averaged``: a mean of the weights
    is kept; ``num_moments``: state values per element. ``matrices``: (count, rows, columns) of matrices that are
    updated as a whole, distributed over the axis ``shared_by``.
    """

    elements: int
    shard: int
    num_buckets: int
    itemsize: int
    gradient_itemsize: int
    main_itemsize: int
    reduced_over: str
    partial_over: tuple[str, ...]
    tied: bool = False
    averaged: bool = False
    num_moments: int = 2
    matrices: tuple[tuple[int, int, int], ...] = ()
    shared_by: str = ""
    zero: int = 1

    @property
    def parameter_bytes(self) -> int:
        return (self.shard if self.zero == 3 else self.elements) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        return (self.shard if self.zero >= 2 else self.elements) * self.gradient_itemsize

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of moments, a mean of the weights, main parameters and main gradients, as far as they exist."""
        return self.shard * (self.num_moments + self.averaged + self._copies) * self.main_itemsize

    @property
    def _copies(self) -> int:
        return (self.itemsize != self.main_itemsize) + (self.gradient_itemsize != self.main_itemsize)

    @property
    def update_bytes(self) -> int:
        """Bytes that norm, copies and update read and write: all are read, and all but the gradient written.

        A mean of the weights takes three kernels: difference, product and sum.
        """
        main, copies = self.main_itemsize, 8 * self.main_itemsize * self.averaged
        if self.gradient_itemsize != main:
            copies += self.gradient_itemsize + main
        if self.itemsize != main:
            copies += self.itemsize + main
        return self.shard * (main + (1 + 2 * (self.num_moments + 1)) * main + copies)


@dataclass(frozen=True, slots=True)
class RankHolds:
    """The permanent memory of a rank. ``frozen``: bytes of frozen parameters and of the model's own buffers; ``whole``:
    peak bytes of full weights and gradients, if ranks keep shards of them.
    """

    buffers: tuple[HeldBuffer, ...]
    frozen: int
    whole: int = 0

    @property
    def lasting(self) -> Lasting:
        parameters = self.frozen + sum(b.parameter_bytes for b in self.buffers)
        gradients, optimizer = sum(b.gradient_bytes for b in self.buffers), sum(b.optimizer_bytes for b in self.buffers)
        return Lasting(parameters, gradients, optimizer, self.whole)


def rank_holds(work: CutWork, chunks: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]], layout: Layout,
               spec: Spec) -> RankHolds:  # fmt: skip
    """Return the permanent memory of a pp rank with the unit ranges ``chunks``; ``others``: those of other ranks."""
    chunks, others = list(chunks), list(others)
    groups: dict[tuple[object, ...], list[tuple[HeldParameter, int]]] = {}
    frozen = 0
    held: list[tuple[HeldParameter, int, bool]] = []
    for first, end in chunks:
        for unit in work.units[first:end]:
            held += [(p, count, False) for p, count in unit.parameters]
            frozen += unit.buffers
    for item in work.shared:
        times = sum(item.is_in(*chunk) for chunk in chunks)
        if times and item.held is None:
            frozen += item.buffer_bytes * times
        elif times and item.held is not None:
            count = 1 if item.held.is_trainable else times
            held.append((item.held, count, any(item.is_in(*chunk) for chunk in others)))
    for p, count, tied in held:
        if p.is_trainable:
            key = tied, p.dtype, p.reduced_over, p.partial_over, p.rule, p.shared_by
            groups.setdefault(key, []).append((p, count))
        else:
            shards = layout.mesh.size(p.reduced_over) if layout.zero == 3 else 1
            frozen += -(-p.elements * p.itemsize * count // shards)
    buffers = tuple(_buffer(of, layout, spec, tied=bool(tied)) for (tied, *_), of in groups.items())
    return RankHolds(buffers, frozen, whole_bytes(work, chunks, layout, spec.precision.gradients))


def _buffer(held: Sequence[tuple[HeldParameter, int]], layout: Layout, spec: Spec, *, tied: bool) -> HeldBuffer:
    """Return the buffer of these parameters, each with its count."""
    first, optimizer, matrices = held[0][0], spec.optimizer, Counter[tuple[int, int]]()
    for p, count in held:
        for number, rows, columns in p.matrices:
            matrices[rows, columns] += number * count
    total, ranks = sum(p.starts * count for p, count in held), layout.mesh.size(first.reduced_over)
    num_ranks, alignment = (ranks, optimizer.alignment) if layout.zero >= 1 else (1, "none")
    size = optimizer.bucket_size or default_bucket_size(ranks, optimizer.alignment)
    elements = padded(total, end_multiple(num_ranks, alignment))
    return HeldBuffer(
        elements,
        shard=elements // num_ranks,
        num_buckets=max(1, -(-total // size) if size else 1),
        itemsize=first.itemsize,
        gradient_itemsize=gradient_size(spec.precision.gradients, first.itemsize),
        main_itemsize=8 if first.dtype == "float64" else 4,
        reduced_over=first.reduced_over,
        partial_over=first.partial_over,
        tied=tied,
        averaged=optimizer.ema is not None,
        num_moments=len(moments_of(first.rule, optimizer)),
        matrices=tuple((count, *shape) for shape, count in matrices.items()),
        shared_by=first.shared_by,
        zero=layout.zero if ranks > 1 else min(1, layout.zero),
    )


def bytes_by_axis(held: Held, asked: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes of full weights, and of their gradients, by the axis that shards them. ``asked``: gradient dtype."""
    weights, gradients = dict[str, int](), dict[str, int]()
    for p, count in held:
        weights[p.reduced_over] = weights.get(p.reduced_over, 0) + p.starts * count * p.itemsize
        if p.is_trainable:
            size = p.starts * count * gradient_size(asked, p.itemsize)
            gradients[p.reduced_over] = gradients.get(p.reduced_over, 0) + size
    return weights, gradients


def whole_bytes(work: CutWork, chunks: Sequence[tuple[int, int]], layout: Layout, asked: str | None) -> int:
    """Return the peak bytes of full weights and gradients of a rank with these unit ranges (see planner.cost.whole)."""
    if layout.zero < 2:
        return 0
    mesh, weights, gradients = layout.mesh, list[int](), list[int]()

    def shared(by_axis: Mapping[str, int]) -> int:
        return sum(size for axis, size in by_axis.items() if mesh.size(axis) > 1)

    for first, end in chunks:
        for unit in work.units[first:end]:
            of_unit = bytes_by_axis(unit.parameters, asked)
            weights.append(shared(of_unit[0]))
            gradients.append(shared(of_unit[1]))
    tied = [(i.held, 1) for i in work.shared if i.held is not None and any(i.is_in(*chunk) for chunk in chunks)]
    tied_weights, tied_gradients = map(shared, bytes_by_axis(tied, asked))
    most = sum(gradients) if layout.waits else max((a + b for a, b in pairwise(gradients)), default=sum(gradients))
    total = most + tied_gradients
    if layout.zero == 3 and layout.reshards:
        total += max((a + b for a, b in pairwise(weights)), default=sum(weights))
    elif layout.zero == 3:
        total += sum(weights) + tied_weights
    return total


def stage_bytes(work: CutWork, layout: Layout, first: int, end: int) -> StageBytes:
    """Return the bytes of a stage of units [first, end), cached in ``work``."""
    assert work.memory is not None, "a work without memory has no rows"
    key = "bytes", layout.recompute, work.source[first:end], layout.waits
    if key not in work.cache:
        of = work.memory(layout.recompute, work.source[first:end], work.micro, layout.waits)
        work.cache[key] = of._replace(returned=work.units[end - 1].returned.at(work.micro))
    return work.cache[key]  # pyright: ignore[reportReturnType]


def peak_of_rank(rank: int, layout: Layout, stages: Sequence[StageBytes], group_size: int | None) -> Peak:
    """Return the peak of a rank, from few microbatches if its order repeats: its memory no longer grows then."""
    mesh = layout.mesh
    pp, own = mesh.pp, mesh.stages_of(rank)
    group = group_size or pp
    count, few = layout.num_microbatches, 2 * pp + 2 * group
    if KINDS[layout.schedule].repeats and count > few:
        count = min(count, few + (count - few) % group)
    kind, sizes = layout.schedule, Sizes(pp, count, mesh.vpp, group)
    order = _orders_of_equal_stages(kind, sizes)[rank] if KINDS[kind].waits else rank_order(kind, sizes, rank)
    awaited, sends = dict[tuple[str, int], float](), dict[tuple[str, int], float]()
    for chunk, stage in enumerate(own):
        for kind, size in (("F", stages[stage].received), ("B", stages[stage].returned)):
            crosses = received_by(kind, stage, 0).crosses(len(stages), pp, mesh.fold)
            awaited[kind, chunk] = size if crosses else 0.0
        for kind, size in (("F", stages[stage].sent), ("B", stages[stage - 1].returned)):
            sends[kind, chunk] = size if sent_by(kind, stage, 0).crosses(len(stages), pp, mesh.fold) else 0.0
    sent, under_way = {"F": 0.0, "B": 0.0}, list[float]()
    for action, following in zip_longest(order, order[1:]):
        waiting = awaited.get((following.kind, following.chunk), 0.0) if following else 0.0
        under_way.append(waiting + sent["F"] + sent["B"])
        if action.kind != "W":
            sent[action.kind] = sends[action.kind, action.chunk]
    return peak(order, [stages[stage] for stage in own], under_way)


@lru_cache(maxsize=256)
def _orders_of_equal_stages(kind: str, sizes: Sizes) -> tuple[Order, ...]:
    return build_schedule(kind, *sizes).orders
