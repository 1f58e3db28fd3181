"""How far an update drives two sides apart that differ by nothing but the rounding of their gradients.

AdamW's first update    lr · g / (|g| + eps): of a gradient no larger than eps, its rounding is as large as the update
Muon                    the update is rounded to bfloat16 before the Newton-Schulz iterations, which raise singular
                        values of any size to about 1: those below the rounding of the largest one are noise
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from passes.program.matrices import Matrices
from planner.spec.optimizer import OptimizerSpec
from planner.updates import base_of
from runtime.verify.reference import places_of

_SCALES = (1.1, 1.3, 1.7)  # no powers of two: every element of a scaled matrix is rounded otherwise


def noise_of_updates(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], o: OptimizerSpec, norm: float
) -> dict[str, Tensor]:
    """By element how far apart AdamW's first update drives the two sides.

    ``norm``: of all gradients, before clipping. Whether the gradients go together, ``compare_gradients`` says.
    """
    lr = greatest_rate(o)
    scale = 1.0 if o.clip_grad_norm is None else min(1.0, o.clip_grad_norm / (norm + 1e-6))

    def update(gradient: Tensor) -> Tensor:
        scaled = gradient.detach().double().cpu() * scale
        return lr * scaled / (scaled.abs() + o.eps)

    both = {n: (found[n], t) for n, t in truth.items() if t is not None and n in found and found[n].shape == t.shape}
    return {name: (update(mine) - update(true)).abs().nan_to_num(0.0) for name, (mine, true) in both.items()}


def noise_of_matrices(
    gradients: Mapping[str, Tensor | None], matrices: Mapping[str, Matrices], o: OptimizerSpec
) -> dict[str, Tensor]:
    """By element how far Muon's update of each of ``matrices``, by weight, moves if its gradient is rounded otherwise.

    Elements of one matrix have one bound: the iterations mix its rows and columns.
    """
    lr, adjust = greatest_rate(o), base_of(o).adjust_lr
    found: dict[str, Tensor] = {}
    for name, own in matrices.items():
        gradient = gradients.get(name)
        if gradient is None:
            continue
        whole = gradient.detach().float().cpu()
        found[name] = torch.zeros(whole.shape, dtype=torch.float64)
        for dim, boxes in places_of(tuple(whole.shape), own):
            part = torch.cat([whole[box] for box in boxes], dim)
            update = _update(part, adjust)
            apart = max((_update(part * scale, adjust) - update).abs().max().item() for scale in _SCALES)
            for box in boxes:
                found[name][box] = lr * apart
    return found


def _update(gradient: Tensor, adjust: str) -> Tensor:
    """PyTorch's, of a weight of zeros, at a learning rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], 1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=adjust).step()
    return weight.detach()


def greatest_rate(o: OptimizerSpec) -> float:
    """The greatest learning rate of all groups."""
    return max(o.lr, *(group.lr or 0.0 for group in o.groups.values()), 0.0)
