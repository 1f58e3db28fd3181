"""The types that a tensor can have over the tensor-parallel axis, each tied to the type of its gradient.

    I        invariant    the same on all ranks; the gradient is the same on all ranks
    R        replicated   the same on all ranks; the gradients are partial and still to be summed
    V(d)     sharded      dim d is cut; the gradient is cut alike
    P        partial      the ranks' tensors are to be summed; the gradient is the same on all ranks

A sharded dim is a row of segments. Each sharded segment is cut in tp equal parts and a rank's tensor is its part of
every segment, in order: so a fused QKV of [q | k | v] stays one local GEMM. A segment that is not sharded is held whole
by every rank with partial gradients (R), as the one key head of multi-query attention. ``padding`` counts elements that
were added at the end of the dim to make it divide (a vocabulary, a sequence). They are no data: of a value they are
anything finite, of a gradient zero, and no rule sums over them or lets a split or a merge of dims move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

# A message for each: behind more of them a copy costs less than their number. A microbatch has few sequences.
MOST_RUNS = 8


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A run of ``size`` elements of a sharded dim (global size); replicated unless ``sharded``."""

    size: int
    sharded: bool = True

    def local(self, tp: int) -> int:
        return self.size // tp if self.sharded else self.size


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A value's type over the tp axis: kind I, R, V or P; for V the dim and its segments (global sizes)."""

    kind: str
    dim: int = -1
    segments: tuple[Segment, ...] = ()
    padding: int = 0

    def __str__(self) -> str:
        if self.kind != "V":
            return self.kind
        parts = "+".join(f"{s.size}" if s.sharded else f"{s.size}R" for s in self.segments)
        return f"V({self.dim}:{parts}{f' pad {self.padding}' if self.padding else ''})"

    @property
    def is_sharded(self) -> bool:
        return self.kind == "V"

    @property
    def has_whole_segment(self) -> bool:
        """Whether some segment is replicated inside a sharded dim."""
        return any(not s.sharded for s in self.segments)

    @property
    def is_disjoint(self) -> bool:
        """Whether the shards of all ranks hold each element once, and nothing else."""
        return not self.padding and not self.has_whole_segment

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(s.size for s in self.segments)

    def moved(self, dim: int) -> Placement:
        """The same cut on another dim."""
        return Placement("V", dim, self.segments, self.padding)

    def local_size(self, tp: int) -> int:
        """Elements of the sharded dim that one rank holds."""
        return sum(s.local(tp) for s in self._padded_segments())

    def local_shape(self, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
        """The shape on one rank of a tensor of global ``shape``."""
        if self.kind != "V":
            return tuple(shape)
        return tuple(self.local_size(tp) if d == self.dim else n for d, n in enumerate(shape))

    def slices(self, tp: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the (padded) global dim that ``rank`` holds, in local order."""
        ranges, start = [], 0
        for segment in self._padded_segments():
            size = segment.local(tp)
            first = start + (rank * size if segment.sharded else 0)
            ranges.append((first, first + size))
            start += segment.size
        return tuple(ranges)

    def data_sizes(self, tp: int, rank: int) -> tuple[int, ...]:
        """Of each of the ranges of ``slices`` how many elements are no padding; they come first."""
        end = sum(self.sizes)
        return tuple(max(0, min(stop, end) - start) for start, stop in self.slices(tp, rank))

    def num_runs(self, shape: Sequence[int]) -> int:
        """In how many runs of memory a rank's part of one segment of a contiguous tensor of ``shape`` lies."""
        return prod(shape[: self.dim])

    def in_place(self, shape: Sequence[int]) -> bool:
        """Whether ranks exchange parts of a tensor of ``shape``, full or sharded, in place. Not with padding, which the
        full tensor does not have.
        """
        return not self.padding and len(self.segments) == 1 and 0 < self.num_runs(shape) <= MOST_RUNS

    def _padded_segments(self) -> tuple[Segment, ...]:
        if not self.padding:
            return self.segments
        *head, last = self.segments
        return (*head, Segment(last.size + self.padding, last.sharded))


I = Placement("I")  # noqa: E741 - the literature's name for the type
R = Placement("R")
P = Placement("P")


def V(dim: int, *sizes: int, padding: int = 0) -> Placement:
    """A sharded dim of evenly cut segments: ``V(2, 768, 768, 768)`` is a fused QKV's output."""
    return Placement("V", dim, tuple(Segment(n) for n in sizes), padding)


def evenly(dim: int, size: int, tp: int) -> Placement:
    """A dim of ``size`` in one segment, padded to the next multiple of ``tp`` if it does not divide."""
    return V(dim, size, padding=-size % tp)


@runtime_checkable
class Sizes(Protocol):
    """Ranks of each axis; the experts' own ones are ``ep`` and ``etp``."""

    @property
    def tp(self) -> int: ...

    @property
    def cp(self) -> int: ...

    @property
    def ep(self) -> int: ...

    @property
    def etp(self) -> int: ...

    @property
    def has_expert_axes(self) -> bool: ...

    def pp_rank_of(self, stage: int) -> int: ...


Run = tuple[int, int, int]  # a dim, the distance of two sequences along it, and their number


@dataclass(frozen=True, slots=True)
class Draw:
    """``shape``: of the value of one full microbatch. ``batch``: (dim, step, number) of the sequences in it; None
    if there is one, or (not ``by_sample``) all share the value. ``cut``: how ranks of cp share it, in 2·cp parts.
    """

    site: int
    shape: tuple[int, ...]
    batch: Run | None
    by_sample: bool
    cut: Placement | None = None
