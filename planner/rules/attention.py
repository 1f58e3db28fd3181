"""scaled_dot_product_attention(q[b,h,s,d], k[b,g,t,d], v[b,g,t,d], mask): by heads.

    heads            q, k, v cut by heads; a mask or bias with a heads dim is cut alike, else it is whole
    shared key heads q cut by heads, k and v whole (R): fewer key heads than ranks, each rank picks those its heads read
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from planner.rules.base import Option, Site, aligned
from planner.types import Placement, R, V


def attention(site: Site) -> Iterator[Option]:
    q, k, v = site.node.args[:3]
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    if len({q, k, v}) < 3 or len(site.shape(q)) != 4:
        return
    heads, groups = site.shape(q)[1], site.shape(k)[1]
    if not site.divides(heads):
        return
    given = _masks(site, V(1, heads)) | {q: V(1, heads)}
    if site.divides(groups):
        yield site.option(V(1, heads), given | {k: V(1, groups), v: V(1, groups)}, "heads", attends=True)
    elif groups < heads:
        yield site.option(V(1, heads), given | {k: R, v: R}, "shared key heads", attends=True)


def _masks(site: Site, cut: Placement) -> dict[fx.Node, Placement]:
    out_shape = site.shape()
    return {n: aligned(cut, out_shape, site.shape(n)) for n in site.inputs[3:]}
