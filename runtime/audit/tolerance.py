"""How far apart rounding may drive two runs of one model, by the lowest precision that it computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# In half precision a smaller loss may differ by as much as this one: cross-entropy subtracts logits that are larger
# than their difference. Logits of 4 to 8 in bfloat16 are rounded by up to 0.016 on each side.
SMALL_LOSS = 2.0
NOISE = 8.0  # rounding errors of the model's largest gradient that any gradient may be off by


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences: ``loss`` and ``gradient`` relative, ``parameter`` absolute after ``num_updates`` updates.
    A loss below ``small_loss`` may differ as much as that.

    A parameter's own rounding comes on top: see ``rounding``.
    """

    dtype: torch.dtype
    loss: float
    gradient: float
    parameter: float
    num_updates: int = 1
    small_loss: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, lr: float, given: float | None = None, *, num_updates: int = 1) -> Tolerance:
        """By the lowest precision that a model computes in; ``given`` replaces those of loss and gradients."""
        table = {torch.float64: (1e-10, 1e-8, 1e-4), torch.float32: (2e-6, 5e-5, 0.2)}
        # AdamW moves an element by about lr whatever its gradient's size: a noisy sign is worth 2·lr an update.
        loss, gradient, updates = table.get(dtype, (2e-2, 1e-1, 2.0 * num_updates))
        small = SMALL_LOSS if given is None and dtype not in table else 0.0
        return cls(dtype, given or loss, given or gradient, updates * lr, num_updates, small)

    def of_loss(self, loss: float) -> float:
        """The relative difference allowed to this loss."""
        return self.loss * max(1.0, self.small_loss / max(abs(loss), 1e-300))

    def rounding(self, truth: Tensor) -> Tensor:
        """The rounding of a stored parameter, by element: each update adds up to one step between neighbours, eps·|x|.

        In bfloat16 a step is larger than the update itself. One process rounds at each update; the engine updates
        float32 main weights and rounds once. |x| is taken as large as the tolerance lets the engine's parameter be.
        """
        largest = truth.detach().double().abs() + self.parameter
        return largest * (torch.finfo(truth.dtype).eps * self.num_updates)

    def gradient_floor(self, largest: float) -> float:
        """Below this size a gradient is rounding noise of the model's ``largest`` (as of a key's bias in attention)."""
        return NOISE * torch.finfo(self.dtype).eps * largest / self.gradient


@contextmanager
def lowest_precision() -> Iterator[_Precision]:
    """Watches the floating-point results of all ops inside; ``.dtype`` is the lowest precision among them."""
    with _Precision() as seen:
        yield seen


class _Precision(TorchDispatchMode):
    dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if is_float and torch.finfo(value.dtype).eps > torch.finfo(self.dtype).eps:
                self.dtype = value.dtype
        return result
