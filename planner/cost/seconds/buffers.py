"""The memory and communication of the optimizer of one pipeline rank, from the parameters of its units.

A buffer is as long as its parameters from slot to slot, and each bucket ends on a multiple (planner.sharding.buckets):
here the buckets are counted as total / bucket size, so a length is off by less than one end's multiple a bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.cost.cut.units import CutWork, HeldParameter
from planner.cost.layout import Layout
from planner.cost.seconds.sharded import SIZES, whole_bytes
from planner.sharding.buckets import default_bucket_size, end_multiple, padded
from planner.spec.spec import Spec
from planner.spec.update_rules import moments_of


@dataclass(frozen=True, slots=True)
class HeldBuffer:
    """One gradient buffer of a rank: elements with padding, bytes of an element of its parameters and its gradients.

    ``shard``: elements that this rank updates. ``tied``: units that hold its parameters, if they are tied.
    ``averaged``: a running mean of the weights is kept; ``num_moments``: values that the update rule keeps.
    ``matrices``: (how many, rows, columns) of those that it updates whole, over ``shared_by``.
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
        """Bytes of weights that stay."""
        return (self.shard if self.zero == 3 else self.elements) * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that stay."""
        return (self.shard if self.zero >= 2 else self.elements) * self.gradient_itemsize

    @property
    def optimizer_bytes(self) -> int:
        """The moments, a mean of the weights if there is one, main parameters and gradients if the buffer is less
        precise.
        """
        return self.shard * (self.num_moments + self.averaged + self._copies) * self.main_itemsize

    @property
    def _copies(self) -> int:
        return (self.itemsize != self.main_itemsize) + (self.gradient_itemsize != self.main_itemsize)

    @property
    def update_bytes(self) -> int:
        """Moved by norm, copies and the update: gradient, moments and parameters read, all but the gradient written.

        A mean of the weights: difference, product and sum, each read and written by itself.
        """
        main, copies = self.main_itemsize, 8 * self.main_itemsize * self.averaged
        if self.gradient_itemsize != main:
            copies += self.gradient_itemsize + main
        if self.itemsize != main:
            copies += self.itemsize + main
        return self.shard * (main + (1 + 2 * (self.num_moments + 1)) * main + copies)


@dataclass(frozen=True, slots=True)
class RankHolds:
    """``frozen``: bytes of frozen parameters, and of the model's own buffers. ``whole``: of full weights and gradients
    at once, if ranks keep shards of them.
    """

    buffers: tuple[HeldBuffer, ...]
    frozen: int
    whole: int = 0

    @property
    def parameters(self) -> int:
        return self.frozen + sum(b.parameter_bytes for b in self.buffers)

    @property
    def gradients(self) -> int:
        return sum(b.gradient_bytes for b in self.buffers)

    @property
    def optimizer(self) -> int:
        return sum(b.optimizer_bytes for b in self.buffers)


def rank_holds(work: CutWork, chunks: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]], layout: Layout,
               spec: Spec) -> RankHolds:  # fmt: skip
    """``chunks``: the ranges of units of this pp rank; ``others``: those of the other ranks."""
    chunks, others = list(chunks), list(others)
    groups: dict[tuple[str, str, tuple[str, ...], bool, str, str], _Sums] = {}
    frozen = 0
    held: list[tuple[HeldParameter, int, bool]] = []
    for first, end in chunks:
        for unit in work.units[first:end]:
            held += [(p, count, False) for p, count in unit.parameters]
            frozen += unit.buffers
    for item in work.tied:
        times = sum(item.is_in(*chunk) for chunk in chunks)
        if times and item.held is None:
            frozen += item.buffer_bytes * times
        elif times and item.held is not None:
            count = 1 if item.held.is_trainable else times
            held.append((item.held, count, any(item.is_in(*chunk) for chunk in others)))
    for p, count, tied in held:
        if not p.is_trainable:
            shards = layout.mesh.size(p.reduced_over) if layout.zero == 3 else 1
            frozen += -(-p.elements * p.itemsize * count // shards)
            continue
        key = p.dtype, p.reduced_over, p.partial_over, tied, p.rule, p.shared_by
        sums = groups.setdefault(key, _Sums(p.itemsize))
        sums.elements += p.starts * count
        for number, *shape in p.matrices:
            sums.matrices[tuple(shape)] += number * count
    asked = spec.precision.gradients
    buffers = tuple(
        _buffer(sums, dtype, asked, over, partial, tied, rule, shared_by, layout, spec)
        for (dtype, over, partial, tied, rule, shared_by), sums in groups.items()
    )
    return RankHolds(buffers, frozen, whole_bytes(work, chunks, layout, asked))


@dataclass
class _Sums:
    """Of parameters that share a buffer."""

    itemsize: int
    elements: int = 0
    matrices: Counter[tuple[int, ...]] = field(default_factory=Counter)


def _buffer(
    sums: _Sums, dtype: str, asked: str | None, over: str, partial: tuple[str, ...], tied: bool, rule: str,
    shared_by: str, layout: Layout, spec: Spec,
) -> HeldBuffer:  # fmt: skip
    total, itemsize = sums.elements, sums.itemsize
    optimizer, ranks = spec.optimizer, layout.mesh.size(over)
    sharded = layout.zero >= 1
    num_ranks, alignment = (ranks, optimizer.alignment) if sharded else (1, "none")
    size = optimizer.bucket_size or default_bucket_size(ranks, optimizer.alignment)
    num_buckets = max(1, -(-total // size) if size else 1)
    elements = padded(total, end_multiple(num_ranks, alignment))
    main = 8 if dtype == "float64" else 4
    gradient = SIZES[asked] if asked else max(4, itemsize)
    kept = optimizer.ema is not None, len(moments_of(rule, optimizer))
    shard = elements // num_ranks
    matrices = tuple((count, shape[0], shape[1]) for shape, count in sums.matrices.items())
    kept = (*kept, matrices, shared_by, layout.zero if ranks > 1 else min(1, layout.zero))
    return HeldBuffer(elements, shard, num_buckets, itemsize, gradient, main, over, partial, tied, *kept)
