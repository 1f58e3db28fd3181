"""A number for the bits of a tensor: equal tensors have equal ones, different ones practically never.

    words of 8 bytes as rows of 1024:   Σ_i (2i + 1)·Σ_j w_ij   +   K·Σ_j (2j + 1)·Σ_i w_ij        modulo 2^64

Integers add up to the same on every device and in every order. It reads a tensor twice at memory speed and
allocates nothing of its size: its cost is about that of copying the weights into the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_WIDTH, _WORD = 1024, 8
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15, odd: columns do not cancel rows


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """0 for a tensor without values (meta, fake, empty)."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    data = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    size = data.numel() // _WORD * _WORD
    rest = data[size:].to(torch.int64)
    if data.storage_offset() % _WORD:
        data = data.clone()
    words = data[:size].view(torch.int64)
    body = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    parts = (body.sum(1), body.sum(0) * _MIX, words[body.numel() :] * 3, rest * 5)
    return sum(int(_weighted(part)) for part in parts) % (1 << 64) - (1 << 63)


def fingerprint_of_model(model: nn.Module) -> dict[str, int]:
    """By dotted name, of every parameter and buffer."""
    named: Iterable[tuple[str, Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: fingerprint(tensor) for name, tensor in named}


def _weighted(values: Tensor) -> Tensor:
    return (values * (2 * torch.arange(values.numel(), device=values.device) + 1)).sum()
