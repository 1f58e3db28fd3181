"""The next token from a row of logits: the most probable one, or one drawn from the most probable ones.

    greedy      arg max z                                          of equal ones the lowest id
    sampled     arg max z/T + g,   g = −ln(−ln u)                  Gumbel: token i has the probability softmax(z/T)[i]
    top-k       only the k greatest z                              and those equal to the least of them
    top-p       only the most probable tokens, until their probabilities add up to p

u is named, not drawn (passes.ops.counted): it depends on the seed, the prompt's place in the call, the position and the
token. So each layout and each batch size finds the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.ops.counted import uniform_of

SITE = "generate"


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token is chosen. ``temperature`` 0: greedy. Raises PlanError for numbers that mean nothing."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            _refuse(
                f"the temperature is {self.temperature}", "temperature", "use 0 for the most probable token, or more"
            )
        if self.top_k is not None and self.top_k < 1:
            _refuse(f"top_k is {self.top_k}", "top_k", "use 1 or more, or leave it out")
        if self.top_p is not None and not (0.0 < self.top_p <= 1.0):
            _refuse(f"top_p is {self.top_p}", "top_p", "use a share above 0, up to 1, or leave it out")
        for name in ("top_k", "top_p"):
            if getattr(self, name) is not None and not self.temperature:
                _refuse(f"{name} limits sampling, and the temperature is 0", name, "set a temperature, such as 1.0")

    def tokens(self, logits: Tensor, samples: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[n] (int64) from logits [n, v]; ``samples``: the prompt of each row; ``positions``: of the new tokens."""
        z = logits.double()
        if not self.temperature:
            return z.argmax(1)
        z = _most_probable(_greatest(z / self.temperature, self.top_k), self.top_p)
        sample, position = (torch.tensor(x, device=z.device).unsqueeze(1) for x in (samples, positions))
        u = uniform_of(self.seed, SITE, position, sample, torch.arange(z.shape[1], device=z.device))
        return (z - (-u.log()).log()).argmax(1)


def _greatest(z: Tensor, k: int | None) -> Tensor:
    if k is None or k >= z.shape[1]:
        return z
    return z.masked_fill(z < z.topk(k, 1).values[:, -1:], -torch.inf)


def _most_probable(z: Tensor, p: float | None) -> Tensor:
    """A token stays while those before it have less than ``p`` together: the first always does."""
    if p is None or p == 1.0:
        return z
    ordered, ids = z.sort(dim=1, descending=True, stable=True)
    shares = ordered.softmax(1)
    is_beyond = shares.cumsum(1) - shares >= p
    return z.masked_fill(is_beyond.scatter(1, ids, is_beyond), -torch.inf)


def _refuse(what: str, where: str, fix: str) -> None:
    raise PlanError(what, where=where, fix=fix)
