"""Ops over images [n, channels, …]: the dims that each of them runs along. Without ``n`` in front, that is all of them.

convolutions    channels and the dims after them        pools    the dims after the channels
"""

from __future__ import annotations

from torch import fx

_CONVOLUTIONS = {f"{name}{n}d": n for name in ("conv", "conv_transpose") for n in (1, 2, 3)}
_POOLS = {f"{kind}_pool{n}d": n for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}


def is_spatial(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name in _CONVOLUTIONS or name in _POOLS


def dims_of_image(node: fx.Node) -> frozenset[int]:
    """The dims of the first operand that a spatial op runs along."""
    name = getattr(node.target, "_opname", "")
    ndim = node.all_input_nodes[0].meta["val"].dim()
    if name in _POOLS:
        return frozenset(range(ndim - _POOLS[name], ndim))
    return frozenset(range(ndim - _CONVOLUTIONS[name] - 1, ndim))
