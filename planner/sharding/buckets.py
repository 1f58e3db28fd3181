"""The place of every parameter in the contiguous buffers of ZeRO-1, and the part that each rank owns.

    buffer      parameters in reverse order, so that the backward fills it from the front
    bucket      a run of the buffer that is reduced in one collective
    shard       rank r of n owns the r-th of n equal parts of EVERY bucket

Two layouts. ``none``: parameters touch, and a bucket's end is padded to a multiple of n (the layout of the ZeRO-1
figure: 16 elements, 4 ranks, parameters of 3, 5, 6 and 2). ``nccl``: each parameter starts on a multiple of 64 elements
(aligned loads) and a bucket ends on a multiple of lcm(n, 128) (aligned shards).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import lcm

_START_MULTIPLE = 64
_END_MULTIPLE = 128


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Elements ``start`` up to, but not with, ``stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def shifted(self, offset: int) -> Range:
        return Range(self.start + offset, self.stop + offset)

    def intersection(self, other: Range) -> Range:
        """The common elements; empty (but well formed) if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """The part of one parameter that one rank owns: ``local`` in the rank's shard of its bucket, ``param`` in the
    flattened parameter.
    """

    local: Range
    param: Range


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the buffer."""

    name: str
    world: Range
    bucket: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of the buffer with its end padding, which ``num_unpadded`` leaves out."""

    index: int
    world: Range
    num_unpadded: int
    slots: tuple[Slot, ...]

    def shard(self, rank: int, num_ranks: int) -> Range:
        """The part of the buffer that ``rank`` owns in this bucket."""
        size = len(self.world) // num_ranks
        start = self.world.start + rank * size
        return Range(start, start + size)

    def owned_ranges(self, rank: int, num_ranks: int) -> dict[str, OwnedRange]:
        """Each parameter with at least one element that ``rank`` owns."""
        shard = self.shard(rank, num_ranks)
        owned = {}
        for slot in self.slots:
            world = slot.world.intersection(shard)
            if len(world):
                owned[slot.name] = OwnedRange(world.shifted(-shard.start), world.shifted(-slot.world.start))
        return owned


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer over ``num_ranks`` data-parallel ranks."""

    num_ranks: int
    buckets: tuple[Bucket, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @property
    def num_elements(self) -> int:
        """With all padding."""
        return self.buckets[-1].world.stop if self.buckets else 0

    def shard_elements(self) -> int:
        """Elements that one rank owns over all buckets."""
        return self.num_elements // self.num_ranks


def lay_out(
    parameters: Iterable[tuple[str, int]],
    num_ranks: int,
    *,
    alignment: str = "nccl",
    bucket_size: int | None = None,
    units: Mapping[str, object] | None = None,
) -> BufferLayout:
    """Lay out ``parameters`` (name, number of elements; in the model's order) over ``num_ranks``.

    A bucket closes once it has at least ``bucket_size`` elements; None means one bucket. With ``units`` (name → unit)
    a bucket has parameters of one unit.
    """
    filler = _Filler(start_multiple(alignment), end_multiple(num_ranks, alignment))
    previous: object = None
    for name, num_elements in reversed(_together(list(parameters), units or {})):
        filler.align()
        unit = None if units is None else units.get(name)
        if unit != previous:
            filler.close()
        previous = unit
        filler.add(name, num_elements)
        if bucket_size is not None and filler.bucket_elements >= bucket_size:
            filler.close()
    filler.close()
    return BufferLayout(num_ranks, tuple(filler.buckets))


def _together(parameters: list[tuple[str, int]], units: Mapping[str, object]) -> list[tuple[str, int]]:
    """The parameters of a unit one after the other, units in the order of their first ones."""
    found: dict[object, list[tuple[str, int]]] = {}
    for name, num_elements in parameters:
        found.setdefault(units.get(name), []).append((name, num_elements))
    return [entry for of_unit in found.values() for entry in of_unit]


def start_multiple(alignment: str) -> int:
    """A parameter's start is a multiple of this, in elements."""
    return _START_MULTIPLE if alignment == "nccl" else 1


def end_multiple(num_ranks: int, alignment: str) -> int:
    """A bucket's end is a multiple of this, in elements."""
    return num_ranks if alignment == "none" else lcm(num_ranks, _END_MULTIPLE)


def padded(num_elements: int, multiple: int) -> int:
    """The next multiple that is not below ``num_elements``."""
    return -(-num_elements // multiple) * multiple


def default_bucket_size(num_ranks: int, alignment: str = "nccl") -> int | None:
    """max(40 M, 1 M·n) elements: large enough to use the link's bandwidth at any n. None (one bucket) for ``none``."""
    return max(40_000_000, 1_000_000 * num_ranks) if alignment == "nccl" else None


@dataclass
class _Filler:
    """Appends parameters to the open bucket; closing it pads its end."""

    start_multiple: int
    end_multiple: int
    buckets: list[Bucket] = field(default_factory=list)
    bucket_start: int = 0
    cursor: int = 0
    slots: list[Slot] = field(default_factory=list)

    @property
    def bucket_elements(self) -> int:
        return self.cursor - self.bucket_start

    def align(self) -> None:
        """Move to the next parameter's start, even if it then opens a bucket of its own."""
        self.cursor = padded(self.cursor, self.start_multiple)

    def add(self, name: str, num_elements: int) -> None:
        start = self.cursor
        self.cursor = start + num_elements
        self.slots.append(Slot(name, Range(start, self.cursor), len(self.buckets)))

    def close(self) -> None:
        if not self.slots:
            return
        world = Range(self.bucket_start, padded(self.cursor, self.end_multiple))
        self.buckets.append(Bucket(len(self.buckets), world, self.bucket_elements, tuple(self.slots)))
        self.bucket_start = self.cursor = world.stop
        self.slots = []
