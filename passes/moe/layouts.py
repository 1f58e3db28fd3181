"""The meaning of a value's dims: they count tokens, experts, choices of a token, or features; calls rearrange them.

    x[b, s, d] → copies[E, b·s, d] → [E·b·s, d]      ((b), (s), (d)) → ((E), (b·s), (d)) → ((E, b·s), (d))

A value that counts tokens can be held as rows [n, features..], one for each pair of a token and an expert that it
chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from passes.rules.rule import RESULT, Factor, OpRule, Place, Role


class Counts(StrEnum):
    """The things that a part of a dim counts."""

    TOKENS = "tokens"
    EXPERTS = "experts"
    CHOICES = "choices"
    FEATURES = "features"


@dataclass(frozen=True, slots=True)
class Part:
    """``stride``: how many tokens, experts or choices one step is."""

    counts: Counts
    size: int
    stride: int = 1


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

    @property
    def feature_dims(self) -> list[int]:
        """Those of more than one feature."""
        return [d for d, axis in enumerate(self.axes) if axis and not self.is_row(d)]

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

    def without(self, dim: int) -> Layout:
        return Layout(tuple(axis for d, axis in enumerate(self.axes) if d != dim))

    def at(self, place: Place, size: int) -> Axis | None:
        """The things that a factor of ``size`` counts there; None if it cuts across them."""
        found, step = list[Part](), 1
        for part in reversed(self.axes[place.dim]):
            end = step * part.size
            first, last = max(place.inner, step), min(place.inner * size, end)
            if first < last:
                if first % step or last % first or end % last:
                    return None
                stride = 1 if part.counts is Counts.FEATURES else part.stride * (first // step)
                found.insert(0, Part(part.counts, last // first, stride))
            step = end
        return tuple(found)

    def is_by_token(self) -> bool:
        """Whether tokens come first and in their order, then choices, then features; any of them may be one alone."""
        parts = list(_merged(part for axis in self.axes for part in axis))
        order = [Counts.TOKENS, Counts.CHOICES, Counts.FEATURES]
        kinds = [part.counts for part in parts]
        return kinds == [c for c in order if c in kinds] and all(p.stride < 2 for p in parts)


def followed(
    rule: OpRule,
    given: Mapping[int, Layout],
    ndim: int,
    repeated: Callable[[int], Counts] = lambda _: Counts.FEATURES,
    summed: Counts = Counts.FEATURES,
) -> Layout | None:
    """The layout of a result of ``ndim`` dims, by the rule of its call and the layouts of operands, by position.

    ``repeated``: the things counted by new elements, so many, that no operand has. ``summed``: things that it may add
    up. None if it mixes others than features, or if aligned dims of operands count different things.
    """
    meaning: dict[Factor, Axis] = {}
    kept: dict[int, list[Part]] = {operand: [] for operand in given}
    for factor in rule.factors:
        found = {o: given[o].at(place, factor.size) for o in given if (place := factor.at(o)) is not None}
        new = _axis(Part(repeated(factor.size) if factor.role is Role.EACH else Counts.FEATURES, factor.size))
        axis, *others = {*found.values()} or {new}
        if others or axis is None:
            return None
        is_each = factor.role is Role.EACH and factor.at(RESULT) is not None
        meaning[factor] = axis if is_each else new
        for operand in found if is_each or (factor.role is Role.SUM and {p.counts for p in axis} == {summed}) else ():
            kept[operand] += axis
    if any(sizes_of(kept[o]) != sizes_of(p for axis in layout.axes for p in axis) for o, layout in given.items()):
        return None
    along = [[p for f in reversed(rule.along(RESULT, d)) for p in meaning[f]] for d in range(ndim)]
    return Layout(tuple(tuple(_merged(parts)) for parts in along))


def sizes_of(parts: Iterable[Part]) -> dict[Counts, int]:
    """How many tokens, experts and choices are counted."""
    found: dict[Counts, int] = {}
    for part in parts:
        if part.counts is not Counts.FEATURES:
            found[part.counts] = found.get(part.counts, 1) * part.size
    return found


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
        elif part.counts is last.counts and last.stride == part.stride * part.size:
            last = Part(part.counts, last.size * part.size, part.stride)
        else:
            yield last
            last = part
    if last is not None:
        yield last
