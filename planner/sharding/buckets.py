"""The offset of every parameter in the contiguous buffers of ZeRO-1, and the part that each rank owns.

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
    """Elements [``start``, ``stop``)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def shifted(self, offset: int) -> Range:
        return Range(self.start + offset, self.stop + offset)

    def intersection(self, other: Range) -> Range:
        """Return the common elements, an empty range if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """The part of a parameter that one rank owns: ``local`` in the rank's shard of the bucket, ``param`` in the
    flattened parameter.
    """

    local: Range
    param: Range


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's range ``world`` in the buffer, and the index of its bucket."""

    name: str
    world: Range
    bucket: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of the buffer. ``num_unpadded``: its elements without the padding at the end."""

    index: int
    world: Range
    num_unpadded: int
    slots: tuple[Slot, ...]

    def shard(self, rank: int, num_ranks: int) -> Range:
        """Return the part of the buffer that ``rank`` owns in this bucket."""
        size = len(self.world) // num_ranks
        start = self.world.start + rank * size
        return Range(start, start + size)

    def owned_ranges(self, rank: int, num_ranks: int) -> dict[str, OwnedRange]:
        """Return the part that ``rank`` owns of each parameter, by name, if it is not empty."""
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
        """Elements of all buckets, with padding."""
        return self.buckets[-1].world.stop if self.buckets else 0

    def shard_elements(self) -> int:
        """Return the elements of all buckets that one rank owns."""
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

    A bucket closes once it has at least ``bucket_size`` elements (None: one bucket) and, with ``units`` (name → unit),
    before a parameter of another unit.
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
    """Return the parameters grouped by unit, units in the order of their first parameters."""
    by_unit: dict[object, list[tuple[str, int]]] = {}
    for name, num_elements in parameters:
        by_unit.setdefault(units.get(name), []).append((name, num_elements))
    return [entry for of_unit in by_unit.values() for entry in of_unit]


def start_multiple(alignment: str) -> int:
    """Return the number of elements of which a parameter's start is a multiple."""
    return _START_MULTIPLE if alignment == "nccl" else 1


def end_multiple(num_ranks: int, alignment: str) -> int:
    """Return the number of elements of which a bucket's end is a multiple."""
    return num_ranks if alignment == "none" else lcm(num_ranks, _END_MULTIPLE)


def padded(num_elements: int, multiple: int) -> int:
    """Round ``num_elements`` up to a multiple."""
    return -(-num_elements // multiple) * multiple


def default_bucket_size(num_ranks: int, alignment: str = "nccl") -> int | None:
    """Return max(40 M, 1 M·n) elements, which use the bandwidth of links for any n; None (one bucket) for ``none``."""
    return max(40_000_000, 1_000_000 * num_ranks) if alignment == "nccl" else None


@dataclass
class _Filler:
    """Appends parameters to the open bucket, and pads its end when it closes."""

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
        """Move the cursor to the start of the next parameter, even if this parameter opens a new bucket."""
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
