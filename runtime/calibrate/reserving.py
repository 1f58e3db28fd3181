"""The share of its tensors that PyTorch's allocator reserves beyond them, by training a few layers on this GPU.

    tensors that stay    weights in bfloat16, with 16 bytes an element beside them: gradient, main weight, moments
    steps                every saved tensor kept; then layers recomputed, whose tensors are freed in another order
    share                of each kind of step (most reserved − most that lived) / most that lived; the larger one

The steps of a real model have more sizes than these, so that the default of ``device.slack`` is the least.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.cluster.cluster import GPU_SLACK

LAYERS, SEQUENCES, LENGTH, WIDTH, VOCABULARY, STEPS = 4, 4, 2048, 2048, 32000, 2
OPTIMIZER_BYTES = 16


class Layer(nn.Module):
    """An MLP with a norm before it, as between the attentions of a Transformer."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)
        self.up = nn.Linear(width, 4 * width, device=device, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * width, width, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def reserved_share(device: torch.device) -> float | None:
    """Of a GPU; None if its free memory is too small for these layers."""
    try:
        return round(max(GPU_SLACK, *(_of_steps(device, again=again) for again in (False, True))), 3)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _of_steps(device: torch.device, *, again: bool) -> float:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    train(device, again=again)
    lived, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return (reserved - lived) / lived


def train(device: torch.device, *, again: bool, width: int = WIDTH, length: int = LENGTH) -> list[Tensor]:
    """``again``: each layer is recomputed in its backward. The gradients of the last step, without an update."""
    layers = nn.ModuleList([Layer(width, device) for _ in range(LAYERS)])
    head = nn.Linear(width, VOCABULARY, bias=False, device=device, dtype=torch.bfloat16)
    weights = [*layers.parameters(), *head.parameters()]
    stays = [torch.empty(OPTIMIZER_BYTES * w.numel(), device=device, dtype=torch.uint8) for w in weights]
    found: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(SEQUENCES, length, width, device=device, dtype=torch.bfloat16)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        logits = head(x).flatten(0, 1).float()
        target = torch.zeros(SEQUENCES * length, device=device, dtype=torch.int64)
        found = list(torch.autograd.grad(F.cross_entropy(logits, target), weights))
    del stays
    return found
