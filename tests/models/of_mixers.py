"""Models of packed documents that mix the tokens of a sequence otherwise than by attention: plain, or kept within
documents by positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 31, 8
Mixer = Callable[["Mixing", Tensor, Tensor], Tensor]


class Mixing(nn.Module):
    """x + linear(mixed(x)). ``mix``: of the activations [b, t, d] and the place of each token in its document."""

    def __init__(self, mix: Mixer) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mix = mix
        self.tokens, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.taps, self.decay = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.inner(F.silu(self.mix(self, x, position_ids)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-100)


def _before(x: Tensor, distance: int = 1) -> Tensor:
    return F.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]


def convolution(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    return model.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def recurrence(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = model.decay.sigmoid() * state + x[:, step]
        found.append(state)
    return torch.stack(found, 1)


def masked_too_little(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    """The second token of a document reads the last one of another."""
    return x + _before(x, 2) * (places > 0)[..., None]


def stacked_taps(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    taps = torch.stack([_before(x, n) for n in range(3)], -1)
    kept = places[..., None] >= torch.arange(3, device=x.device)
    return torch.einsum("btdn,nd->btd", taps * kept[:, :, None], model.taps)


def reset_recurrence(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = model.decay.sigmoid() * state * (places[:, step, None] > 0) + x[:, step]
        found.append(state)
    return torch.stack(found, 1)


def masked_linear_attention(model: Mixing, x: Tensor, places: Tensor) -> Tensor:
    numbers = (places == 0).cumsum(1)
    return ((x @ x.transpose(1, 2)).tril() * (numbers[:, :, None] == numbers[:, None])) @ x


MIXED = {f.__name__: f for f in (recurrence, masked_too_little)}
MIXED |= {
    "running_sum": lambda model, x, places: x.cumsum(1) / (places + 1)[..., None],
    "shift": lambda model, x, places: x + _before(x),
    "joined_shift": lambda model, x, places: torch.cat(
        [x[..., ::2], torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)[..., ::2]], -1
    ),
    "fourier": lambda model, x, places: torch.fft.fft(x, dim=1).real,
    "centred": lambda model, x, places: x - x.mean(1, keepdim=True),
    "linear_attention": lambda model, x, places: (x @ x.transpose(1, 2)).tril() @ x,
}
APART = {f.__name__: f for f in (stacked_taps, reset_recurrence, masked_linear_attention)}
APART |= {
    "masked_shift": lambda model, x, places: x + _before(x) * (places > 0)[..., None],
    "chosen_shift": lambda model, x, places: (
        torch.where((places > 0)[..., None], x.roll(1, 1), torch.zeros_like(x)) - x
    ),
    "masked_convolution": lambda model, x, places: sum(
        (model.taps[n] * _before(x, n) * (places >= n)[..., None] for n in range(3)), torch.zeros_like(x)
    ),
}
