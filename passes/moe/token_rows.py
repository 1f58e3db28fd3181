"""Values that count tokens, seen as rows: what each of their dims counts, and the calls of a branch on some rows.

    x[b, s, d] → copies[E, b·s, d] → [E·b·s, d]      ((b), (s), (d)) → ((E), (b·s), (d)) → ((E, b·s), (d))

A value that counts tokens can be held as rows [n, features..], one for each pair of a token and an expert that it
chose. A branch of one expert computes its rows instead of all tokens:

    [b, s, h]  →  rows [m, h], as [1, m, h]: all dims of tokens but the last are 1

The tokens' dims are the shortest run of leading dims that has as many elements as there are tokens. Numbers of dropout
belong to a token, and follow it to the rank of its expert:

    names = name_rows(t)  →  names[token] → dispatch → part e  →  drop_rows(rows, p, names)

So each element is dropped as in one process (``dropout: layout_invariant``). Without names a rank would draw for rows
that others have too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

import torch
from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.domain import ROWS, Domain
from passes.moe.layers import Refusal, check_draws
from passes.program.builder import Builder, arguments_with
from passes.program.ops.aten import aten, is_random, shape_of
from passes.program.ops.groups import WITH_SIZES
from passes.rules.follow import rule_by_rows
from passes.rules.rule import RESULT, Factor, OpRule, Place, Role, operands_of
from passes.types.types import Draw


class Counts(StrEnum):
    """The things that a part of a dim counts."""

    TOKENS = "tokens"
    EXPERTS = "experts"
    CHOICES = "choices"
    FEATURES = "features"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a dim. ``stride``: how many tokens, experts or choices one step is."""

    counts: Counts
    size: int
    stride: int = 1


Axis = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of each dim of a value, outermost first: ``axes``; none for a dim of size 1."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, tokens: Iterable[int], inner: Iterable[Part] = (), features: Iterable[int] = ()) -> Layout:
        """Return the layout of [tokens.., inner.., features..]."""
        sizes, axes, stride = list(tokens), list[Axis](), 1
        for size in reversed(sizes):
            axes.insert(0, _axis(Part(Counts.TOKENS, size, stride)))
            stride *= size
        axes += [_axis(part) for part in inner]
        return cls((*axes, *(_axis(Part(Counts.FEATURES, n)) for n in features)))

    @property
    def parts(self) -> list[Part]:
        return [part for axis in self.axes for part in axis]

    @property
    def is_pure(self) -> bool:
        """Whether no dim counts features and something else."""
        return all(len({part.counts is Counts.FEATURES for part in axis}) < 2 for axis in self.axes)

    def is_row(self, dim: int) -> bool:
        """Return whether a dim disappears when pairs become rows."""
        return any(part.counts is not Counts.FEATURES for part in self.axes[dim])

    @property
    def feature_dims(self) -> list[int]:
        """The dims of more than one feature."""
        return [d for d, axis in enumerate(self.axes) if axis and not self.is_row(d)]

    def row_dim(self, dim: int) -> int:
        """Return the place of a dim of features in [n, features..]."""
        return 1 + sum(not self.is_row(d) for d in range(dim))

    def features(self, shape: Iterable[int]) -> list[int]:
        """Return the sizes that are left of ``shape``."""
        return [n for d, n in enumerate(shape) if not self.is_row(d)]

    def dim_of(self, counts: Counts) -> int:
        """Return the dim that counts this and nothing else; -1 if there is none."""
        found = [d for d, axis in enumerate(self.axes) if [part.counts for part in axis] == [counts]]
        return found[0] if len(found) == 1 else -1

    def without(self, dim: int) -> Layout:
        return Layout(tuple(axis for d, axis in enumerate(self.axes) if d != dim))

    def at(self, place: Place, size: int) -> Axis | None:
        """Return the things that a factor of ``size`` counts there; None if it cuts across them."""
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
        """Return whether tokens come first and in their order, then choices, then features; any may be one alone."""
        parts = _merged(self.parts)
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
    """Return the layout of a result of ``ndim`` dims, by the rule of its call and the layouts of operands, by position.

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
    if any(sizes_of(kept[o]) != sizes_of(layout.parts) for o, layout in given.items()):
        return None
    along = [[p for f in reversed(rule.along(RESULT, d)) for p in meaning[f]] for d in range(ndim)]
    return Layout(tuple(tuple(_merged(parts)) for parts in along))


def sizes_of(parts: Iterable[Part]) -> dict[Counts, int]:
    """Return how many tokens, experts and choices are counted."""
    found: dict[Counts, int] = {}
    for part in parts:
        if part.counts is not Counts.FEATURES:
            found[part.counts] = found.get(part.counts, 1) * part.size
    return found


def _axis(part: Part) -> Axis:
    return (part,) if part.size > 1 else ()


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Merge neighbours if one continues the count of the other."""
    merged: list[Part] = []
    for part in parts:
        last = merged.pop() if merged and merged[-1].counts is part.counts else None
        if last is not None and (part.counts is Counts.FEATURES or last.stride == part.stride * part.size):
            merged.append(Part(part.counts, last.size * part.size, part.stride))
        else:
            merged += [part] if last is None else [last, part]
    return merged


class TokenRows:
    """Rows of ``num_tokens`` tokens; one expert's are as many as each of a rank's ``num_here`` has on average."""

    def __init__(self, num_tokens: int, num_rows: int, num_here: int, refusal: Refusal) -> None:
        self.num_tokens, self.num_rows, self.num_here, self.refusal = num_tokens, num_rows, num_here, refusal

    def lead(self, shape: tuple[int, ...]) -> int:
        """Return how many leading dims are those of the tokens; 0 if none are."""
        return next((n for n in range(1, len(shape) + 1) if prod(shape[:n]) == self.num_tokens), 0)

    def flat(self, node: fx.Node) -> list[int]:
        """Return the shape with one dim of tokens."""
        shape = shape_of(node)
        lead = self.lead(shape)
        if not lead:
            raise self.refusal(node, f"they read {node.name} {list(shape)}, which has no dim of tokens")
        return [self.num_tokens, *shape[lead:]]

    def val(self, like: fx.Node, *, of_all: bool = False) -> Tensor:
        """Return the meta value of one expert's rows, or ``of_all``, with the features of ``like`` [rows, rest..]."""
        length = self.num_rows if of_all else max(1, self.num_rows // self.num_here)
        return torch.empty((length, *shape_of(like)[1:]), dtype=like.meta["val"].dtype, device="meta")

    def shaped(self, build: Builder, part: fx.Node, like: fx.Node) -> fx.Node:
        """Return rows [m, rest..] with as many dims as ``like`` has."""
        shape = shape_of(like)
        lead = self.lead(shape)
        sizes = [1] * (lead - 1) + [shape_of(part)[0], *shape[lead:]]
        if lead == 1:
            return part
        return build.call(aten.reshape.default, part, sizes, domain=Domain(rows=lead - 1))

    def flattened(self, build: Builder, node: fx.Node) -> fx.Node:
        """Return rows of ``shaped`` as [m, rest..] again."""
        rows = node.meta["domain"].rows
        if not rows:
            return node
        sizes = [shape_of(node)[rows], *shape_of(node)[rows + 1 :]]
        return build.call(aten.reshape.default, node, sizes, domain=ROWS)

    def again(
        self, build: Builder, node: fx.Node, own: Mapping[fx.Node, fx.Node], weights: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        """Make a call of the branch, which keeps tokens, again on rows. ``weights``: those read in the place of others,
        without tokens."""
        lead = self.lead(shape_of(node))
        args, kwargs = arguments_with(node, {**weights, **own})
        first = next(own[n] for n in node.all_input_nodes if n in own)
        length = shape_of(first)[first.meta["domain"].rows]
        sizes, val = [1] * (lead - 1) + [length, *shape_of(node)[lead:]], node.meta["val"]
        if node.target in WITH_SIZES:
            args = (args[0], sizes, *args[2:])
        val = torch.empty(sizes, dtype=val.dtype, device="meta") if isinstance(val, Tensor) else None
        given = {"val": val, "grad": node.meta["grad"], "domain": Domain(rows=lead - 1)}
        return build.call(node.target, *args, **kwargs, **given)

    def keeps_tokens(self, node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> bool:
        """Return whether the tokens' dims of all that a call reads are those of the result, in the same order, and no
        other operand has them."""
        rule, read = rule_by_rows(node), operands_of(node)
        if rule is None or not self.lead(shape_of(node)):
            return False
        given = {i: self._layout(n) for i, n in enumerate(read) if n in own}
        of_tokens = [f for d in range(self.lead(shape_of(node))) for f in rule.along(RESULT, d) if f.size > 1]
        if any(f.at(i) for f in of_tokens for i in range(len(read)) if i not in given):
            return False
        return bool(given) and followed(rule, given, len(shape_of(node))) == self._layout(node)

    def _layout(self, node: fx.Node) -> Layout:
        shape = shape_of(node)
        lead = self.lead(shape)
        return Layout.of(shape[:lead], features=shape[lead:])


# ---- dropout of rows


class DroppedRows:
    """Owns what names the tokens: the dims of tokens of every draw of the branches, which must agree."""

    def __init__(self, tokens: TokenRows, bodies: Iterable[list[fx.Node]], *, alone: bool = False) -> None:
        """Raise if draws are not named. ``alone``: dropout without names may draw here."""
        drawing = [node for body in bodies for node in body if is_random(node)]
        self.tokens = tokens
        self.nodes = {n for n in drawing if n.target is aten.dropout.default and "draw" in n.meta}
        is_drawn = {n for n in drawing if n in self.nodes or (alone and n.target is aten.dropout.default)}
        check_draws([n for n in drawing if n not in is_drawn], "rows", tokens.refusal)
        found = {self._of_tokens(node) for node in self.nodes}
        if len(found) > 1 or None in found:
            raise tokens.refusal(min(self.nodes), "the draws of dropout are not named by token")
        self.draw = next(iter(found), None)

    def _of_tokens(self, node: fx.Node) -> Draw | None:
        """Return the draw's dims of tokens; None if others count sequences, or are sharded."""
        draw: Draw = node.meta["draw"]
        lead = self.tokens.lead(shape_of(node))
        dims = [draw.batch[0]] if draw.batch is not None else []
        dims += [draw.cut.dim] if draw.cut is not None else []
        return replace(draw, site=-1, shape=draw.shape[:lead]) if max(dims, default=0) < lead else None

    def names(self, build: Builder) -> fx.Node | None:
        """Return the names of all tokens of this rank; None if nothing is dropped."""
        if self.draw is None:
            return None
        made = build.call(exchange.name_rows, self.tokens.num_tokens)
        made.meta["draw"] = self.draw
        return made

    def dropped(self, build: Builder, node: fx.Node, rows: fx.Node, names: fx.Node, sites: tuple[int, ...]) -> fx.Node:
        """Return the dropout ``node`` of rows with these names. ``sites``: of the same call on each rank of ep."""
        draw: Draw = node.meta["draw"]
        lead, given = self.tokens.lead(shape_of(node)), {"grad": node.meta["grad"], "domain": rows.meta["domain"]}
        made = build.call(exchange.drop_rows, rows, node.args[1], names, sites, **given)
        made.meta["draw"] = Draw(draw.site, draw.shape[lead:], None, by_sample=False)
        return made
