"""scaled_dot_product_attention(q[b,h,s,d], k[b,g,t,d], v[b,g,t,d], mask): by heads.

heads            q, k, v cut by heads, in one run or several; a mask with a heads dim is sharded alike, else it is
replicated shared key heads q sharded by heads, k and v replicated (R): fewer key heads than ranks, each rank picks
those its heads read
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.partition.options.base import Covers, Option, Site, aligned
from passes.partition.options.forms import Form
from passes.types.types import Placement, R, V


def attention(site: Site) -> Iterator[Option]:
    q, k, v = site.node.args[:3]
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    if len(site.shape(q)) != 4:
        return
    heads, groups = site.shape(q)[1], site.shape(k)[1]
    for cut in _head_cuts(site, q, heads):
        shared = _of_key_heads(cut, heads // groups, site.tp)
        given = _masks(site, cut) | {q: cut}
        if shared is not None:
            yield site.option(cut, given | {k: shared, v: shared}, Form.PARTS, attends=True)
        elif groups < heads and len(cut.segments) == 1 and len({q, k, v}) == 3:
            yield site.option(cut, given | {k: R, v: R}, Form.SHARED_KEYS, attends=True)


def _head_cuts(site: Site, q: fx.Node, heads: int) -> list[Placement]:
    """The plain cut of the heads, and those in several runs that are under discussion (heads paired across halves)."""
    asked = {c for n in (None, q) for c in site.candidates(n) if c.dim == 1 and c.is_disjoint}
    plain = {V(1, heads)} if site.divides(heads) else set()
    return sorted(plain | {c for c in asked if all(site.divides(n) for n in c.sizes)})


def _of_key_heads(cut: Placement, ratio: int, tp: int) -> Placement | None:
    """The cut of the key heads that the query heads of ``cut`` read, ``ratio`` to each; None if it is uneven."""
    if any(size % (ratio * tp) for size in cut.sizes):
        return None
    return V(1, *(size // ratio for size in cut.sizes))


def _masks(site: Site, cut: Placement) -> dict[fx.Node, Placement]:
    out_shape = site.shape()
    return {n: aligned(cut, out_shape, site.shape(n)) for n in site.inputs[3:]}


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (Covers(attention, "scaled_dot_product_attention", gives={Form.PARTS, Form.SHARED_KEYS}),)
