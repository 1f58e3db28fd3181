"""Errors of half precision, beside those that plain PyTorch makes in the same precision; the truth is in float64.

error       norm of the difference of all gradients, in parts of the truth's norm
own         that of the unmodified model, or of plain ops, in half precision on the same device
limit       RATIO times the own error
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.table import Table

RATIO = 1.5


def plainly(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients of the unmodified model, the whole batch at once; experts in a loop: grouped products lack float64."""
    own = copy.deepcopy(model)
    if hasattr(own, "set_experts_implementation"):
        own.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    own.to(device, dtype)
    own(**{name: x.to(device) for name, x in batch.items()}).loss.backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def error(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Of all tensors together; one that ``found`` lacks is zero."""
    wrong = [(found[n].cpu().double() - x if n in found else x).norm() for n, x in truth.items()]
    return (torch.stack(wrong).norm() / torch.stack([x.norm() for x in truth.values()]).norm()).item()


def of_tensors(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error of a tensor, in parts of its own norm."""
    pairs = zip(found, truth, strict=True)
    return max(((x.cpu().double() - y.cpu()).norm() / y.cpu().norm().clamp(min=1e-30)).item() for x, y in pairs)


def hold(table: Table, what: str, ours: float, own: float) -> None:
    """Note a failure if ours is more than RATIO times the own error."""
    table.hold(f"{what}: error in parts of plain PyTorch's", ours / own if own else ours, RATIO)
