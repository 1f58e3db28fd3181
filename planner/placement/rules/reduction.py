"""Ops along one or several dims: a cut elsewhere survives; a sum over the cut dim gives partial sums.

sum, mean over the cut dim          → P        (the mean is the local sum over the global count)
logsumexp, softmax over the cut dim → I, V     (ranks exchange the maximum and the sum)
amax, amin without a gradient       → I        (ranks exchange theirs); a Euclidean norm: the sum of squares
norms over the cut dim              → V        (ranks exchange the mean and the mean square)
softmax, norms, cumsum, sort, topk  → as their input, if the dim they work on is replicated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from planner.graph.ops.aten import aten, named, reduced_dims
from planner.placement.rules.base import Covers, Option, Site
from planner.placement.rules.forms import Form
from planner.placement.types import I, P, Placement

SOFTMAX = {aten.softmax.int, aten.log_softmax.int}
EXTREMES = {aten.amax.default, aten.amin.default}
REDUCED = {*EXTREMES, aten.linalg_vector_norm.default}
EXCHANGES: dict[Any, tuple[int, int]] = {  # op → all-reduces of one number a row, in the forward and in the backward
    aten.logsumexp.default: (2, 0),
    aten.softmax.int: (2, 1),
    aten.log_softmax.int: (2, 1),
    aten.layer_norm.default: (2, 2),
    aten.rms_norm.default: (1, 1),
    aten.linalg_vector_norm.default: (1, 0),
    aten.amax.default: (1, 0),
    aten.amin.default: (1, 0),
}


def reduction(site: Site) -> Iterator[Option]:
    """amax, var, any …: ``op(x, dims?, keepdim?)``."""
    yield from _reduction(site, lambda _: ())


def total(site: Site) -> Iterator[Option]:
    """sum."""
    yield from _reduction(site, lambda cut: _partial_sum(site, cut, Form.SUM))
    yield from _of_partial_sums(site)


def mean(site: Site) -> Iterator[Option]:
    yield from _reduction(site, lambda cut: _partial_sum(site, cut, Form.MEAN))
    yield from _of_partial_sums(site)


def logsumexp(site: Site) -> Iterator[Option]:
    def over_ranks(cut: Placement) -> Iterator[Option]:
        if reduced_dims(site.node) == {cut.dim} and len(cut.segments) == 1:
            yield Option((cut,), I, Form.OVER_RANKS, detour=True)

    yield from _reduction(site, over_ranks)


def extreme(site: Site) -> Iterator[Option]:
    """amax, amin; between equal elements of several ranks a gradient would have to be shared."""

    def over_ranks(cut: Placement) -> Iterator[Option]:
        if not site.grad(site.node) and not cut.padding and not cut.has_whole_segment:
            yield Option((cut,), I, Form.OVER_RANKS, detour=True)

    yield from _reduction(site, over_ranks)


def vector_norm(site: Site) -> Iterator[Option]:
    given, x = named(site.node), site.inputs[0].meta["val"]
    is_euclidean = given["ord"] == 2 and given["dtype"] is None and not x.is_complex()

    def over_ranks(cut: Placement) -> Iterator[Option]:
        if is_euclidean and not cut.padding and not cut.has_whole_segment:
            yield Option((cut,), I, Form.OVER_RANKS, detour=True)

    yield from _reduction(site, over_ranks)


def _reduction(site: Site, over: Callable[[Placement], Iterable[Option]]) -> Iterator[Option]:
    """``over``: the options for a sharded dim that is reduced."""
    x = site.inputs[0]
    dims, ndim = reduced_dims(site.node), len(site.shape(x))
    kept = len(site.shape()) == ndim
    places = [d for d in range(ndim) if kept or d not in dims]
    cuts = set(site.candidates(x)) | {c.moved(places[c.dim]) for c in site.candidates() if places[c.dim] not in dims}
    for cut in sorted(cuts):
        if cut.dim in dims:
            yield from over(cut)
        else:
            yield site.option(cut.moved(places.index(cut.dim)), {x: cut}, Form.PARTS)


def _partial_sum(site: Site, cut: Placement, form: Form) -> Iterator[Option]:
    x = site.inputs[0]
    if not cut.padding and not cut.has_whole_segment:
        yield replace(site.option(P, {x: cut}, form), detour=cut.dim == len(site.shape(x)) - 1)


def _of_partial_sums(site: Site) -> Iterator[Option]:
    if site.grad(site.node):
        yield site.partial(site.inputs[:1])


def along_dim(site: Site) -> Iterator[Option]:
    """cumsum(x, dim), sort, topk …: every output is cut as x is, on any other dim."""
    yield from _along(site, lambda _: ())


def softmax(site: Site) -> Iterator[Option]:
    """softmax(x, dim), log_softmax: as others along a dim, or over the ranks' parts of it."""

    def over_ranks(cut: Placement) -> Iterator[Option]:
        if not cut.padding and not cut.has_whole_segment:
            yield Option((cut,), cut, Form.OVER_RANKS, detour=True)

    yield from _along(site, over_ranks)


def _along(site: Site, over: Callable[[Placement], Iterable[Option]]) -> Iterator[Option]:
    """``over``: the options for a shard of the dim that the op runs along."""
    x, *others = site.inputs
    ndim = len(site.shape(x))
    if others or len(site.shape()) != ndim:
        return
    dims = reduced_dims(site.node) if _has_dim(site) else {ndim - 1}
    for cut in sorted({*site.candidates(x), *site.candidates()}):
        if cut.dim in dims:
            yield from over(cut)
        else:
            yield site.option(cut, {x: cut}, Form.PARTS)


def _has_dim(site: Site) -> bool:
    return any(a.name in ("dim", "dims") for a in site.node.target._schema.arguments)  # pyright: ignore


def norm(site: Site) -> Iterator[Option]:
    """layer_norm(x, shape, w, b), rms_norm(x, shape, w): by rows, with weight and bias R; or by features."""
    x = site.inputs[0]
    normalized: Any = site.node.args[1]
    first = len(site.shape(x)) - len(normalized)
    for cut in sorted({*site.candidates(x), *site.candidates()}):
        if cut.dim < first:
            yield site.option(cut, {x: cut}, Form.PARTS)
        elif len(normalized) == 1 and not cut.padding and not cut.has_whole_segment and site.grad(site.node):
            given = dict.fromkeys(site.inputs[1:], cut.moved(0)) | {x: cut}
            yield replace(site.option(cut, given, Form.OVER_RANKS), detour=True)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(norm, "layer_norm rms_norm", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(
        reduction,
        "var var.dim var.correction std std.dim std.correction var_mean.dim var_mean.correction "
        "std_mean.dim std_mean.correction nansum nanmean prod prod.dim_int any any.dim any.dims all all.dim "
        "all.dims argmax argmin max min max.dim min.dim median.dim aminmax count_nonzero.dim_IntList "
        "norm.Scalar norm.ScalarOpt_dim",
    ),
    Covers(total, "sum sum.dim_IntList", gives={Form.PARTS, Form.SUM}),
    Covers(mean, "mean mean.dim", gives={Form.PARTS, Form.MEAN}),
    Covers(extreme, "amax amin", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(vector_norm, "linalg_vector_norm", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(logsumexp, "logsumexp", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(softmax, "softmax.int log_softmax.int", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(
        along_dim,
        "_softmax _log_softmax sort sort.stable topk cumprod argsort cummax cummin logcumsumexp _safe_softmax",
    ),
)
