"""The meaning of a value's dims: they count tokens, experts, choices of a token, or features; calls rearrange them.

    x[b, s, d] → copies[E, b·s, d] → [E·b·s, d]      ((b), (s), (d)) → ((E), (b·s), (d)) → ((E, b·s), (d))

A value that counts tokens can be held as rows [n, features..], one for each pair of a token and an expert that it
chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Counts(StrEnum):
    """The things that a part of a dim counts."""

    TOKENS = "tokens"
    EXPERTS = "experts"
    CHOICES = "choices"
    FEATURES = "features"


@dataclass(frozen=True, slots=True)
class Part:
    """``stride``: of tokens, how many tokens one step is."""

    counts: Counts
    size: int
    stride: int = 0


Axis = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """``axes``: of each dim its parts, outermost first; none for a dim of size 1."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, tokens: Iterable[int], inner: Iterable[Part] = (), features: Iterable[int] = ()) -> Layout:
        """[tokens.., inner.., features..]."""
        sizes, axes, stride = list(tokens), list[Axis](), 1
        for size in reversed(sizes):
            axes.insert(0, _axis(Part(Counts.TOKENS, size, stride)))
            stride *= size
        axes += [_axis(part) for part in inner]
        return cls((*axes, *(_axis(Part(Counts.FEATURES, n)) for n in features)))

    @property
    def counted(self) -> frozenset[Counts]:
        return frozenset(part.counts for axis in self.axes for part in axis)

    @property
    def is_pure(self) -> bool:
        """Whether no dim counts features and something else."""
        kinds = [{part.counts is Counts.FEATURES for part in axis} for axis in self.axes]
        return all(len(kind) < 2 for kind in kinds)

    def is_row(self, dim: int) -> bool:
        """Whether a dim disappears when pairs become rows."""
        return any(part.counts is not Counts.FEATURES for part in self.axes[dim])

    def row_dim(self, dim: int) -> int:
        """The place of a dim of features in [n, features..]."""
        return 1 + sum(not self.is_row(d) for d in range(dim))

    def features(self, shape: Iterable[int]) -> list[int]:
        """The sizes that are left of ``shape``."""
        return [n for d, n in enumerate(shape) if not self.is_row(d)]

    def dim_of(self, counts: Counts) -> int:
        """The dim that counts this and nothing else; -1 if there is none."""
        found = [d for d, axis in enumerate(self.axes) if [part.counts for part in axis] == [counts]]
        return found[0] if len(found) == 1 else -1

    def permuted(self, dims: Iterable[int]) -> Layout:
        return Layout(tuple(self.axes[d] for d in dims))

    def reshaped(self, shape: Iterable[int]) -> Layout | None:
        """None if experts or choices would be split, or tokens and features be mixed."""
        left = list(_merged(part for axis in self.axes for part in axis))
        axes = [_taken(left, size) for size in shape]
        found = [axis for axis in axes if axis is not None]
        return Layout(tuple(found)) if len(found) == len(axes) and not left else None

    def is_by_token(self) -> bool:
        """Whether tokens come first and in their order, then choices, then features; any of them may be one alone."""
        parts = list(_merged(part for axis in self.axes for part in axis))
        order = [Counts.TOKENS, Counts.CHOICES, Counts.FEATURES]
        kinds = [part.counts for part in parts]
        return kinds == [c for c in order if c in kinds] and all(p.stride < 2 for p in parts)


def aligned(layouts: Iterable[Layout], ndim: int) -> Layout | None:
    """The layout of an elementwise result of several values; None if aligned dims count different things."""
    axes: list[Axis] = [()] * ndim
    for layout in layouts:
        for at, axis in enumerate(layout.axes, ndim - len(layout.axes)):
            if axis and axes[at] and axes[at] != axis:
                return None
            axes[at] = axis or axes[at]
    return Layout(tuple(axes))


def _axis(part: Part) -> Axis:
    return (part,) if part.size > 1 else ()


def _merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Merges neighbours if one continues the count of the other."""
    last: Part | None = None
    for part in parts:
        if last is None:
            last = part
        elif part.counts is last.counts is Counts.FEATURES:
            last = Part(part.counts, last.size * part.size)
        elif part.counts is last.counts is Counts.TOKENS and last.stride == part.stride * part.size:
            last = Part(part.counts, last.size * part.size, part.stride)
        else:
            yield last
            last = part
    if last is not None:
        yield last


def _taken(left: list[Part], size: int) -> Axis | None:
    """The next parts, of ``size`` together, off ``left``."""
    found: list[Part] = []
    while size > 1:
        if not left:
            return None
        part = left.pop(0)
        if size % part.size == 0:
            found.append(part)
            size //= part.size
        elif part.size % size == 0 and part.counts in (Counts.TOKENS, Counts.FEATURES):
            rest = part.size // size
            found.append(Part(part.counts, size, part.stride * rest))
            left.insert(0, Part(part.counts, rest, part.stride))
            size = 1
        else:
            return None
    return tuple(found)
