"""Ops along one or several dims that may be sharded too: the parallel forms beside what follows from the factors.

sum over the sharded dim            → P
mean over it                        → P        (the local sum over the global count)
logsumexp, softmax over it          → I, V     (ranks exchange the maximum and the sum)
amax, amin without a gradient       → I        (ranks exchange theirs); a Euclidean norm: the sum of squares
norms over it                       → V        (ranks exchange the mean and the mean square)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.by_factors import by_factors
from passes.partition.options.forms import Form
from passes.program.ops.aten import named, reduced_dims
from passes.types.types import I, P, Placement


def total(site: Site) -> Iterator[Option]:
    """sum."""
    yield from by_factors(site)
    yield from _partial_sums(site, Form.SUM)


def mean(site: Site) -> Iterator[Option]:
    yield from by_factors(site)
    yield from _partial_sums(site, Form.MEAN)


def _partial_sums(site: Site, form: Form) -> Iterator[Option]:
    x = site.inputs[0]
    for cut in _along(site):
        yield replace(site.option(P, {x: cut}, form), detour=cut.dim == len(site.shape(x)) - 1)


def logsumexp(site: Site) -> Iterator[Option]:
    yield from by_factors(site)
    for cut in site.candidates(site.inputs[0]):
        if reduced_dims(site.node) == {cut.dim} and len(cut.segments) == 1:
            yield Option((cut,), I, Form.OVER_RANKS, detour=True)


def extreme(site: Site) -> Iterator[Option]:
    """amax, amin; between equal elements of several ranks a gradient would have to be shared."""
    yield from by_factors(site)
    for cut in () if site.grad(site.node) else _along(site):
        yield Option((cut,), I, Form.OVER_RANKS, detour=True)


def vector_norm(site: Site) -> Iterator[Option]:
    yield from by_factors(site)
    given, x = named(site.node), site.inputs[0].meta["val"]
    if given["ord"] == 2 and given["dtype"] is None and not x.is_complex():
        for cut in _along(site):
            yield Option((cut,), I, Form.OVER_RANKS, detour=True)


def softmax(site: Site) -> Iterator[Option]:
    """softmax(x, dim), log_softmax."""
    yield from by_factors(site)
    for cut in _along(site, site.candidates()):
        yield Option((cut,), cut, Form.OVER_RANKS, detour=True)


def norm(site: Site) -> Iterator[Option]:
    """layer_norm(x, shape, w, b), rms_norm(x, shape, w): by rows, with weight and bias R; or by features."""
    yield from by_factors(site)
    x = site.inputs[0]
    normalized: Any = site.node.args[1]
    if len(normalized) > 1 or not site.grad(site.node):
        return
    for cut in _whole(site, {len(site.shape(x)) - 1}, site.candidates()):
        given = dict.fromkeys(site.inputs[1:], cut.moved(0)) | {x: cut}
        yield replace(site.option(cut, given, Form.OVER_RANKS), detour=True)


def _along(site: Site, more: list[Placement] | None = None) -> list[Placement]:
    """Cuts of the first input along the dims that the op reduces or runs along."""
    return _whole(site, reduced_dims(site.node), more or [])


def _whole(site: Site, dims: set[int] | frozenset[int], more: list[Placement]) -> list[Placement]:
    """Every element is on one rank, and is data."""
    cuts = {*site.candidates(site.inputs[0]), *more}
    return sorted(c for c in cuts if c.dim in dims and c.is_disjoint)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(norm, "layer_norm rms_norm", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(total, "sum sum.dim_IntList", gives={Form.PARTS, Form.SUM}),
    Covers(mean, "mean mean.dim", gives={Form.PARTS, Form.MEAN}),
    Covers(extreme, "amax amin", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(vector_norm, "linalg_vector_norm", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(logsumexp, "logsumexp", gives={Form.PARTS, Form.OVER_RANKS}),
    Covers(softmax, "softmax.int log_softmax.int", gives={Form.PARTS, Form.OVER_RANKS}),
)
