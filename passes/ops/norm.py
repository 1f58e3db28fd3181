"""Norms over features that are cut: each rank has some of the features of a token, and the statistics are of them all.

    layer_norm   (x − mean) / sqrt(var + eps) · w + b      ranks exchange Σ x, then Σ (x − mean)²
    rms_norm     x / sqrt(mean square + eps) · w           ranks exchange Σ x²

Both sums are of type P and read as R, so their gradients are summed over ranks too. Weight and bias are cut as x is.
"""

from __future__ import annotations

import torch

from passes.ops.axis import AxisHandle, widened
from passes.ops.collectives import g_f

Tensor = torch.Tensor


def cut_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: AxisHandle, size: int
) -> Tensor:
    """x [.., n/tp] of this rank, n = ``size`` features in all: this rank's part of ``layer_norm``."""
    wide = widened(x)
    centered = wide - _mean(wide, axis, size)
    normed = (centered * torch.rsqrt(_mean(centered.square(), axis, size) + eps)).to(x.dtype)
    return _scaled(normed, weight, bias)


def cut_rms_norm(x: Tensor, weight: Tensor | None, eps: float | None, axis: AxisHandle, size: int) -> Tensor:
    """x [.., n/tp] of this rank, n = ``size`` features in all: this rank's part of ``rms_norm``."""
    wide = widened(x)
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    normed = (wide * torch.rsqrt(_mean(wide.square(), axis, size) + smallest)).to(x.dtype)
    return _scaled(normed, weight, None)


def _mean(x: Tensor, axis: AxisHandle, size: int) -> Tensor:
    return g_f(x.sum(-1, keepdim=True), axis) / size


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias
