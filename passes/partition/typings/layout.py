"""Ops that move elements without computing: reshape, permute, expand, split, slice, cat, and indexing of their results.

A cut follows its elements. Along the dim that a split, slice or cat works on, it survives if the pieces are full
segments: so one fused projection feeds Q, K and V without leaving its rank. Through a reshape, where dims merge and
split, it is carried by the factors:

[3·h] in three segments     seen as [.., 3, heads, d] each segment is heads·d, and the cut falls on heads
[hq + hk + hv]              seen as [heads_q + heads_k + heads_v, d] the segments are counted in larger elements
"""

import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from torch import fx

from passes.partition.typings.base import Covers, Form, Option, Site, by_factors, each, linear
from passes.program.ops.aten import aten, dim_of_cat
from passes.rules.rule import RESULT, OpRule
from passes.types.types import Placement, R, Segment, V

Ends = tuple[int, int]  # an operand, or RESULT, and the one that the cut is carried to


def reshape(site: Site) -> Iterator[Option]:
    (x,) = site.inputs

    def out_of(cut: Placement) -> Placement | None:
        return projected(cut, site.rule, (0, RESULT), site.shape(), site.tp)

    found = {cut: out for cut in site.candidates(x) if (out := out_of(cut)) is not None}
    for wanted in site.candidates():
        cut = projected(wanted, site.rule, (RESULT, 0), site.shape(x), site.tp)
        if cut is not None and out_of(cut) == wanted:
            found[cut] = wanted
    for cut, out in sorted(found.items(), key=str):
        yield site.option(out, {x: cut}, Form.SIZES)
    yield site.partial([x])


def expand(site: Site) -> Iterator[Option]:
    """Cut a dim that is repeated after: each rank repeats its share of times, from a replicated (R) input."""
    yield from each(site, Form.SIZES)
    yield from linear(site)


def split(site: Site) -> Iterator[Option]:
    """Type a split: the tuple's type is its input's; the pieces' types follow in ``getitem``."""
    (x,) = site.inputs
    sizes = site.args[1]
    dim = int(site.args[2])
    cuts = {c for c in (*site.candidates(x), *site.candidates()) if c.dim != dim or pieces_of(c, sizes) is not None}
    pieces = {u.args[1]: u for u in site.node.users if u.target is operator.getitem}
    cuts.update(_joint_cuts(site, [(n, pieces.get(i)) for i, n in enumerate(sizes)], dim))
    for piece in pieces.values():
        cuts.update(c for c in site.candidates(piece) if c.dim != dim)
    for cut in sorted(cuts):
        yield site.option(cut, {x: cut}, Form.SPLIT)
    yield site.partial([x])


def getitem(site: Site) -> Iterator[Option]:
    (source,) = site.inputs
    index = int(site.args[1])
    if source.target is not aten.split_with_sizes.default:
        for cut in site.candidates(source):
            yield site.option(cut, {source: cut}, Form.PARTS)
        return
    sizes: Any = source.args[1]
    dim = int(source.args[2])  # pyright: ignore[reportArgumentType]
    for cut in site.candidates(source):
        if cut.dim != dim:
            yield site.option(cut, {source: cut}, Form.PARTS)
        elif (pieces := pieces_of(cut, sizes)) is not None:
            yield site.option(pieces[index], {source: cut}, Form.PARTS)
    yield site.partial([source])


def slice_(site: Site) -> Iterator[Option]:
    x = site.inputs[0]
    _, dim, start, end, *step = site.args
    size = site.shape(x)[dim]
    yield from by_factors(site)
    if not step:
        along = {c for c in site.candidates(x) if c.dim == dim} | set(_sibling_cuts(site, x, dim))
        bounds = [start, end - start, size - end]
        for cut in sorted(along):
            pieces = pieces_of(cut, bounds)
            if pieces is not None:
                yield site.option(pieces[1], {x: cut}, Form.SEGMENT)
    else:
        yield from _strided(site, x, dim, start, end, step[0])


def _strided(site: Site, x: fx.Node, dim: int, start: int, end: int, step: int) -> Iterator[Option]:
    """Every step-th element of a dim, as in x[.., 1::2]: each rank takes its own, if segments hold full strides."""
    size = site.shape(x)[dim]
    if size % step or start >= step or end <= size - step + start:
        return
    cuts = {c for c in site.candidates(x) if c.dim == dim and not c.padding}
    cuts |= {
        Placement("V", dim, tuple(Segment(s.size * step, s.sharded) for s in c.segments))
        for c in site.candidates()
        if c.dim == dim and not c.padding
    }
    for cut in sorted(cuts):
        if all(s.local(site.tp) % step == 0 for s in cut.segments):
            out = tuple(Segment(s.size // step, s.sharded) for s in cut.segments)
            yield site.option(Placement("V", dim, out), {x: cut}, Form.STRIDED)


def cat(site: Site) -> Iterator[Option]:
    dim, operands = dim_of_cat(site.node), list[fx.Node](site.args[0])
    yield from by_factors(site)
    # each operand sharded along the dim, if some cut of it is a candidate: the result's segments are theirs in a row,
    # even if readers want others
    sizes, is_each_once = [site.shape(n)[dim] for n in operands], len(set(operands)) == len(operands)
    choices = [[c for c in site.candidates(n) if c.dim == dim and not c.padding] for n in operands]
    wanted = is_each_once and (any(choices) or any(c.dim == dim for c in site.candidates()))
    if wanted and all(c or site.divides(size) for c, size in zip(choices, sizes, strict=True)):
        cuts = [c[0] if c else V(dim, size) for c, size in zip(choices, sizes, strict=True)]
        segments = tuple(s for c in cuts for s in c.segments)
        yield site.option(Placement("V", dim, segments), dict(zip(operands, cuts, strict=True)), Form.PARTS)
    # a cut of the result for replicated operands: each is sharded as its own segments (concatenated biases)
    for cut in site.candidates():
        pieces = pieces_of(cut, sizes) if cut.dim == dim else None
        if pieces is not None and all(pieces[operands.index(n)] == p for n, p in zip(operands, pieces, strict=True)):
            yield site.option(cut, dict(zip(operands, pieces, strict=True)), Form.PARTS)


def pieces_of(cut: Placement, sizes: list[int]) -> list[Placement] | None:
    """The types of the pieces when a dim cut as ``cut`` is split into ``sizes``; None if a segment would be torn."""
    if cut.padding:
        return None
    result, queue = [], list(cut.segments)
    for size in sizes:
        taken: list[Segment] = []
        while sum(s.size for s in taken) < size and queue:
            taken.append(queue.pop(0))
        if sum(s.size for s in taken) != size:
            return None
        whole = all(not s.sharded for s in taken)
        result.append(R if whole else Placement("V", cut.dim, tuple(taken)))
    return result


def _joint_cuts(site: Site, pieces: list[tuple[int, fx.Node | None]], dim: int) -> Iterator[Placement]:
    """Yield the cuts of a dim from the candidates of its pieces: all of them sharded; and only those with candidates,
    the rest replicated."""
    wanted = [[c for c in site.candidates(n) if c.dim == dim and not c.padding] if n else [] for _, n in pieces]
    if not any(wanted):
        return
    divide = all(w or site.divides(size) for w, (size, _) in zip(wanted, pieces, strict=True))
    for sharded in (*[True] * divide, *[False] * (not all(wanted))):
        segments = (
            w[0].segments if w else (Segment(size, sharded),) for w, (size, _) in zip(wanted, pieces, strict=True)
        )
        yield Placement("V", dim, tuple(s for of_piece in segments for s in of_piece))


def _sibling_cuts(site: Site, x: fx.Node, dim: int) -> Iterator[Placement]:
    """Yield cuts of slices of one tensor along one dim that tile it: they are a split in other words."""
    slices = [u for u in x.users if u.target is aten.slice.Tensor and u.args[1] == dim and len(u.args) == 4]
    points = sorted({0, site.shape(x)[dim], *(int(b) for u in slices for b in u.args[2:4])})  # pyright: ignore
    exact = {(u.args[2], u.args[3]): u for u in slices}
    if len(points) > 2:
        yield from _joint_cuts(site, [(b - a, exact.get((a, b))) for a, b in pairwise(points)], dim)


def projected(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """Return ``cut`` of the first of ``ends`` as a cut of the second, which has ``shape``; None if it does not survive.

    Padding follows a dim that stays one.
    """
    source, target = ends
    factor = rule.sole(source, cut.dim)
    place = factor.at(target) if factor is not None else None
    if place is not None and rule.sole(target, place.dim) is factor:
        return cut.moved(place.dim)
    if cut.padding:
        return None
    is_even = len(set(cut.segments)) == 1 and cut.segments[0].sharded
    return (_ranks if is_even else _segments)(cut, rule, ends, shape, tp)


def _ranks(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """Even segments: the index of a rank in them is a factor of its own, and follows alone; of one rank the outermost
    part of a segment does."""
    size = cut.segments[0].size
    strides = accumulate((f.size for f in rule.along(ends[0], cut.dim)), operator.mul, initial=1)  # innermost first
    inners = [size // tp] if tp > 1 else [n for n in strides if size % n == 0 and n < size]
    for inner in inners:
        if (at := rule.carried(ends[0], cut.dim, inner, size // inner, ends[1])) is not None:
            run = size // inner * at[1]
            return V(at[0], *[run] * (shape[at[0]] // run))
    return None


def _segments(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """Keep uneven or replicated segments a dim of their own, counted in larger or smaller elements."""
    unit = gcd(*(s.local(tp) for s in cut.segments))
    count = sum(cut.sizes) // unit
    at = rule.carried(ends[0], cut.dim, unit, count, ends[1])
    if at is None or at[1] * count != shape[at[0]]:
        return None
    dim, inner = at
    return Placement("V", dim, tuple(Segment(s.size // unit * inner, s.sharded) for s in cut.segments))


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(getitem, targets=(operator.getitem,)),
    Covers(reshape, "reshape", gives={Form.SIZES}),
    Covers(expand, "expand", gives={Form.SIZES}),
    Covers(split, "split_with_sizes", gives={Form.SPLIT}),
    Covers(slice_, "slice.Tensor", gives={Form.PARTS, Form.SEGMENT, Form.STRIDED}),
    Covers(cat, "cat"),
)
