"""Ops along one or several dims: a cut elsewhere survives; a sum over the cut dim gives partial sums.

sum, mean over the cut dim          → P        (the mean is the local sum over the global count)
logsumexp, softmax over the cut dim → I, V     (ranks exchange the maximum and the sum)
norms over the cut dim              → V        (ranks exchange the mean and the mean square)
softmax, norms, cumsum, sort, topk  → as their input, where the dim they work on is whole
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.graph.aten import aten, reduced_dims
from planner.placement.rules.base import Option, Site
from planner.placement.types import I, P

OVER_RANKS = "over ranks"  # the op itself exchanges, for each row of a cut dim, its statistics
SOFTMAX = {aten.softmax.int, aten.log_softmax.int}
EXCHANGES: dict[Any, tuple[int, int]] = {  # op → all-reduces of one number a row, in the forward and in the backward
    aten.logsumexp.default: (2, 0),
    aten.softmax.int: (2, 1),
    aten.log_softmax.int: (2, 1),
    aten.layer_norm.default: (2, 2),
    aten.rms_norm.default: (1, 1),
}


def reduction(site: Site) -> Iterator[Option]:
    """sum, mean, amax, var …: ``op(x, dims?, keepdim?)``."""
    x = site.inputs[0]
    shape = site.shape(x)
    dims = reduced_dims(site.node)
    kept = len(site.shape()) == len(shape)
    places = [d for d in range(len(shape)) if kept or d not in dims]
    cuts = set(site.candidates(x)) | {c.moved(places[c.dim]) for c in site.candidates() if places[c.dim] not in dims}
    for cut in sorted(cuts):
        if cut.dim not in dims:
            yield site.option(cut.moved(places.index(cut.dim)), {x: cut}, "reduce elsewhere")
        elif site.node.target in SUMS and not cut.padding and not cut.has_whole_segment:
            option = site.option(P, {x: cut}, "partial sum")
            yield replace(option, detour=cut.dim == len(shape) - 1)
        elif site.node.target is aten.logsumexp.default and dims == {cut.dim} and len(cut.segments) == 1:
            yield Option((cut,), I, OVER_RANKS, detour=True)
    if site.node.target in SUMS and site.grad(site.node):
        yield site.partial([x])


SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}


def along_dim(site: Site) -> Iterator[Option]:
    """softmax(x, dim), cumsum(x, dim), topk …: every output is cut as x is, on any other dim."""
    x, *others = site.inputs
    ndim = len(site.shape(x))
    if others or len(site.shape()) != ndim:
        return
    dims = set(reduced_dims(site.node)) if _has_dim(site) else {ndim - 1}
    for cut in sorted({*site.candidates(x), *site.candidates()}):
        if cut.dim not in dims:
            yield site.option(cut, {x: cut}, "along a whole dim")
        elif site.node.target in SOFTMAX and not cut.padding and not cut.has_whole_segment:
            yield Option((cut,), cut, OVER_RANKS, detour=True)


def _has_dim(site: Site) -> bool:
    return any(a.name in ("dim", "dims") for a in site.node.target._schema.arguments)  # pyright: ignore


def norm(site: Site) -> Iterator[Option]:
    """layer_norm(x, shape, w, b), rms_norm(x, shape, w): by rows, where weight and bias are R; or by features."""
    x = site.inputs[0]
    normalized: Any = site.node.args[1]
    first = len(site.shape(x)) - len(normalized)
    for cut in sorted({*site.candidates(x), *site.candidates()}):
        if cut.dim < first:
            yield site.option(cut, {x: cut}, "norm")
        elif len(normalized) == 1 and not cut.padding and not cut.has_whole_segment and site.grad(site.node):
            given = dict.fromkeys(site.inputs[1:], cut.moved(0)) | {x: cut}
            yield replace(site.option(cut, given, OVER_RANKS), detour=True)
