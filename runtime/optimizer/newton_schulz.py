"""The orthogonal factor of a matrix, by Newton-Schulz iterations in bfloat16 (Jordan et al. 2024, Muon).

    X = M / |M|;    five times  X <- a X + (b A + c A²) X,  A = X Xᵀ

Singular values come to lie between about 0.7 and 1.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from planner.spec.update_rules import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """[a, b] of any floating dtype → [a, b] bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def lr_factor(shape: tuple[int, int], adjust_lr: str) -> float:
    """Of the learning rate, for a matrix of this shape.

    match_rms_adamw   0.2 · √max(a, b): the size of AdamW's updates (Liu et al. 2025)
    original          √max(1, a / b)
    """
    a, b = shape
    return 0.2 * math.sqrt(max(a, b)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1.0, a / b))
