"""Pointwise ops: sharded like their operands, on the same dim after broadcasting.

y[.., i/tp, ..] = op(a[.., i/tp, ..], b)        b broadcast over the cut dim is R: each rank adds to its gradient
add, sub, neg, ×constant, casts, copies, where(mask, x, 0) are linear: P in, P out
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from planner.placement.rules.base import Option, Site, aligned, lifted
from planner.placement.rules.forms import Form
from planner.placement.types import Placement

aten = torch.ops.aten

SUMS = {aten.add.Tensor, aten.sub.Tensor}
SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
UNARY_LINEAR = {
    aten.neg.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.dropout.default,
    aten.to.dtype,
    aten.detach.default,
}
# the argument position of the masked value
MASKINGS: dict[Any, int] = {aten.where.ScalarOther: 1, aten.where.ScalarSelf: 2}


def pointwise(site: Site) -> Iterator[Option]:
    """Options of an elementwise op with broadcasting."""
    for cut in _cuts(site):
        if site.node.target is aten.dropout.default and cut.has_whole_segment:
            continue  # each rank draws its own mask, and a replicated segment must be the same on all
        given = {n: aligned(cut, site.shape(), site.shape(n)) for n in site.inputs}
        yield site.option(cut, given, Form.PARTS)
    yield from _partial(site)


def _cuts(site: Site) -> list[Placement]:
    cuts = set(site.candidates())
    for node in site.inputs:
        found = (lifted(cut, site.shape(node), site.shape()) for cut in site.candidates(node))
        cuts.update(cut for cut in found if cut is not None)
    return sorted(cuts)


def _partial(site: Site) -> Iterator[Option]:
    """Linear ops carry partial sums; a cast to fewer bits would round each part, so it does not."""
    target, args = site.node.target, site.node.args
    if not site.grad(site.node):
        return
    if target in SUMS and all(isinstance(a, fx.Node) for a in args[:2]) and len(site.inputs) == 2:
        yield site.partial(site.inputs)
    elif target in SCALINGS and isinstance(args[0], fx.Node) and args[0] is not args[1]:
        yield site.partial(args[:1])  # pyright: ignore[reportArgumentType]
        if target is aten.mul.Tensor and isinstance(args[1], fx.Node):
            yield site.partial(args[1:2])  # pyright: ignore[reportArgumentType]
    elif target in MASKINGS and args[3 - MASKINGS[target]] == 0:
        yield site.partial([args[MASKINGS[target]]])  # pyright: ignore
    elif target in UNARY_LINEAR and not _narrows(site):
        yield site.partial(site.inputs)


def _narrows(site: Site) -> bool:
    before, after = site.inputs[0].meta["val"].dtype, site.node.meta["val"].dtype
    return torch.promote_types(before, after) != after
