"""Ops that read or write rows named by an index: the indexed dims are not sharded, a cut on any other survives.

    index          x[.., i, .., j, ..]     the indices' common dims stand where the first was (or in front)
    gather         y[.., k, ..] = x[.., i[.., k, ..], ..]        index and result are cut alike, or x on dim k
    scatter        x with rows replaced or added to              index and source are cut alike
    index_add      x with rows of a source added                 as index_select, the other way round
    pad, tril …    as along_dim: the dims they work on are whole; linear

All of them are linear in x (and the source): partial sums pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from planner.graph.ops.aten import named
from planner.placement.rules.base import Covers, Option, Site
from planner.placement.rules.forms import Form
from planner.placement.rules.reduction import along_dim
from planner.placement.types import P, Placement, R

aten = torch.ops.aten


def index(site: Site) -> Iterator[Option]:
    """aten.index(x, [None, i, j, ..]): a cut on a dim without an index."""
    arguments: Any = site.node.args
    x, indices = arguments[0], arguments[1]
    places = _places(site, x, indices)
    if places is None or any(i.meta["val"].dtype == torch.bool for i in indices if i is not None):
        return
    cuts = {(c, c.moved(places[c.dim])) for c in site.candidates(x) if c.dim in places}
    back = {after: before for before, after in places.items()}
    cuts |= {(c.moved(back[c.dim]), c) for c in site.candidates() if c.dim in back}
    for before, after in sorted(cuts):
        yield site.option(after, {x: before}, Form.PARTS)
    yield from _index_cut(site, x, indices, back)
    yield site.partial([x])


def _index_cut(site: Site, x: fx.Node, indices: list[fx.Node | None], back: dict[int, int]) -> Iterator[Option]:
    """The rows that are read are cut: each rank reads its own from a replicated x."""
    used = [i for i in indices if i is not None]
    if len(used) != 1 or used[0] is x:
        return
    first = len(site.shape()) - len(back)
    starts = [d for d in range(len(site.shape())) if d not in back]
    if not first:
        return
    offset = starts[0]
    cuts = {c for c in site.candidates() if c.dim in starts}
    cuts |= {c.moved(c.dim + offset) for c in site.candidates(used[0])}
    for cut in sorted(cuts):
        yield site.option(cut, {x: R, used[0]: cut.moved(cut.dim - offset)}, Form.PARTS)


def _places(site: Site, x: fx.Node, indices: list[fx.Node | None]) -> dict[int, int] | None:
    """Dim of x without an index → its dim in the result."""
    ndim = len(site.shape(x))
    used = [d for d, i in enumerate(indices) if i is not None]
    if not used or x in [i for i in indices if i is not None]:
        return None
    common = max(len(site.shape(i)) for i in indices if i is not None)
    together = used == list(range(used[0], used[0] + len(used)))
    before = used[0] if together else 0
    free = [d for d in range(ndim) if d not in used]
    return {
        d: (d if d < before else position + common if not together else d - len(used) + common)
        for position, d in enumerate(free)
    }


def gather(site: Site) -> Iterator[Option]:
    """gather(x, dim, index): x, index and result are cut alike on any other dim of the same size."""
    given = named(site.node)
    x, index_ = given["self"], given["index"]
    if x is index_ or not site.shape(x):
        return
    dim = given["dim"] % len(site.shape(x))
    for cut in _alike(site, dim, [x, index_]):
        yield site.option(cut, {x: cut, index_: cut}, Form.PARTS)
    for cut in sorted(c for c in site.candidates() if c.dim == dim):
        yield site.option(cut, {x: R, index_: cut}, Form.PARTS)
    for cut in site.candidates(x):
        if cut.dim == dim and len(cut.segments) == 1 and site.grad(site.node):
            yield site.option(P, {x: cut}, Form.PICKED)
    yield site.partial([x])


def scatter(site: Site) -> Iterator[Option]:
    """scatter(x, dim, index, value or src), scatter_add, scatter_reduce: all cut alike on any other dim."""
    given = named(site.node)
    x, index_, source = given["self"], given["index"], given.get("src")
    tensors = [t for t in (x, index_, source) if isinstance(t, fx.Node)]
    if len(set(tensors)) < len(tensors) or not site.shape(x):
        return
    dim = given["dim"] % len(site.shape(x))
    for cut in _alike(site, dim, tensors):
        yield site.option(cut, dict.fromkeys(tensors, cut), Form.PARTS)
    if site.node.target in (aten.scatter.src, aten.scatter_add.default):
        yield site.partial([t for t in tensors if t is not index_])


def index_add(site: Site) -> Iterator[Option]:
    """index_add(x, dim, index, source), index_copy: x and the source are cut alike on any other dim."""
    given = named(site.node)
    x, source = given["self"], given["source"]
    if x is source or not site.shape(x):
        return
    dim = given["dim"] % len(site.shape(x))
    for cut in _alike(site, dim, [x, source]):
        yield site.option(cut, {x: cut, source: cut}, Form.PARTS)
    yield site.partial([x, source])


def _alike(site: Site, dim: int, tensors: list[fx.Node]) -> list[Placement]:
    """Candidate cuts on a dim other than ``dim``, of equal size in all of ``tensors`` and the result."""
    found = {c for n in (*tensors, site.node) for c in site.candidates(n) if c.dim != dim}
    shapes = [site.shape(n) for n in (*tensors, site.node)]
    return sorted(c for c in found if all(len(s) > c.dim and s[c.dim] == shapes[0][c.dim] for s in shapes))


def index_put(site: Site) -> Iterator[Option]:
    """index_put(x, indices, values): a cut of the last dims of x, which have no index; the values have them too."""
    given = named(site.node)
    x, values, indices = given["self"], given["values"], given["indices"]
    used = [i for i in indices if i is not None]
    if len({x, values, *used}) < 2 + len(used) or None in indices:
        return
    if any(i.meta["val"].dtype == torch.bool for i in used):
        return
    ndim, first = len(site.shape(x)), len(indices)
    shift = len(site.shape(values)) - ndim
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim >= first}):
        if cut.dim + shift >= 0 and site.shape(values)[cut.dim + shift] == site.shape(x)[cut.dim]:
            yield site.option(cut, {x: cut, values: cut.moved(cut.dim + shift)}, Form.PARTS)
    yield site.partial([x, values])


def pad(site: Site) -> Iterator[Option]:
    """pad(x, [left, right, ..] from the last dim): cut on a dim that is not padded; linear if zeros are added."""
    (x,) = site.inputs
    amounts: Any = site.node.args[1]
    ndim = len(site.shape(x))
    padded = {ndim - 1 - i // 2 for i, n in enumerate(amounts) if n}
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim not in padded}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    given = named(site.node)
    if not given.get("value"):
        yield site.partial([x])


def triangle(site: Site) -> Iterator[Option]:
    """tril(x), triu(x): the last two dims are not sharded."""
    (x,) = site.inputs
    last = len(site.shape(x)) - 2
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim < last}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    yield site.partial([x])


def linear_along_dim(site: Site) -> Iterator[Option]:
    """cumsum, flip, roll, diff: as other ops along a dim, and linear."""
    yield from along_dim(site)
    yield site.partial(site.inputs[:1])


def unfold(site: Site) -> Iterator[Option]:
    """unfold(x, dim, size, step) gives [.., windows, .., size]: cut on any other dim."""
    (x,) = site.inputs
    dim = int(site.node.args[1]) % max(1, len(site.shape(x)))  # pyright: ignore[reportArgumentType]
    last = len(site.shape(x))
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim not in (dim, last)}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    yield site.partial([x])


def complex_view(site: Site) -> Iterator[Option]:
    """view_as_complex [.., 2] → [..], view_as_real back: the pair is not sharded."""
    (x,) = site.inputs
    pair = max(len(site.shape(x)), len(site.shape())) - 1
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim != pair}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    yield site.partial([x])


def one_hot(site: Site) -> Iterator[Option]:
    """one_hot(ids, classes) [.., classes]: cut as the ids."""
    (ids,) = site.inputs
    last = len(site.shape(ids))
    for cut in sorted({c for n in (ids, site.node) for c in site.candidates(n) if c.dim < last}):
        yield site.option(cut, {ids: cut}, Form.PARTS)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(linear_along_dim, "cumsum flip roll diff"),
    Covers(index, "index.Tensor"),
    Covers(gather, "gather", gives={Form.PARTS, Form.PICKED}),
    Covers(scatter, "scatter.src scatter.value scatter_add scatter_reduce.two"),
    Covers(index_add, "index_add index_copy"),
    Covers(index_put, "index_put"),
    Covers(pad, "pad constant_pad_nd"),
    Covers(triangle, "tril triu"),
    Covers(unfold, "unfold"),
    Covers(one_hot, "one_hot"),
    Covers(complex_view, "view_as_complex view_as_real"),
)
