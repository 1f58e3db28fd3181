"""Layers with a chain of products that no pair of a column and a row covers: recurrences, gates after a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.needless import HEADS, LENGTH, SIZE, WIDTH


class Cells(nn.Module):
    """A cell of torch.nn over the tokens, a step at a time, and a projection."""

    def __init__(self, cell: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.cell, self.out = cell(WIDTH, WIDTH, **options), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for t in range(3):
            state = self.cell(x[:, t], state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(states, 1)).repeat(1, 2, 1)


class ScalarMemory(nn.Module):
    """sLSTM: exponential gates, a normalizer, recurrent weights in blocks of a head, then a gated MLP (xLSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.recurrent = nn.Linear(WIDTH, 4 * WIDTH), nn.Parameter(torch.randn(HEADS, SIZE, 4 * SIZE) / 4)
        self.norm, self.up, self.down = nn.GroupNorm(HEADS, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, gates, states = x.shape[0], self.gates(x), []
        h = c = n = top = x.new_zeros(b, WIDTH)
        for t in range(3):
            past = torch.einsum("bhd,hde->bhe", h.view(b, HEADS, SIZE), self.recurrent).view(b, HEADS, 4, SIZE)
            both = gates[:, t].view(b, 4, HEADS, SIZE) + past.transpose(1, 2)
            z, f, i, o = (gate.reshape(b, WIDTH) for gate in both.unbind(1))
            f = F.logsigmoid(f) + top
            top = torch.maximum(f, i)
            f, i = (f - top).exp(), (i - top).exp()
            c, n = f * c + i * z.tanh(), f * n + i
            h = o.sigmoid() * c / n
            states.append(h)
        y = self.norm(torch.stack(states, 1).flatten(0, 1)).view(b, 3, WIDTH)
        a, gate = self.up(y).chunk(2, -1)
        return self.down(F.gelu(a) * gate).repeat(1, 2, 1)


class FocalModulation(nn.Module):
    """Query, context and gates of one projection; contexts of growing kernels, gated, projected and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.mix, self.out = (
            nn.Linear(WIDTH, 2 * WIDTH + 3),
            nn.Conv2d(WIDTH, WIDTH, 1),
            nn.Linear(WIDTH, WIDTH),
        )
        self.contexts = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=WIDTH, bias=False) for kernel in (3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x.unflatten(1, (2, LENGTH // 2))).permute(0, 3, 1, 2)
        query, context, gates = fused.split((WIDTH, WIDTH, 3), 1)
        total = torch.zeros_like(query)
        for i, layer in enumerate(self.contexts):
            context = F.gelu(layer(context))
            total = total + context * gates[:, i : i + 1]
        total = total + F.gelu(context.mean((2, 3), keepdim=True)) * gates[:, 2:]
        return self.out((query * self.mix(total)).permute(0, 2, 3, 1)).flatten(1, 2)


class GatedMixing(nn.Module):
    """An MLP over the features, gated by a softmax of its own result (PatchTSMixer)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return y * self.gate(y).softmax(-1)


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "lstm cell": lambda: Cells(nn.LSTMCell),
    "gru cell": lambda: Cells(nn.GRUCell),
    "gru cell without biases": lambda: Cells(nn.GRUCell, bias=False),
    "rnn cell": lambda: Cells(nn.RNNCell, nonlinearity="relu"),
    "scalar memory": ScalarMemory,
    "focal modulation": FocalModulation,
    "gated mixing": GatedMixing,
}
