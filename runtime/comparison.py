"""Compare a run with the truth: how far apart two tensors are, and how far apart rounding may drive them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NOISE = 8.0  # rounding errors of the model's largest gradient that any gradient may be off by


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed differences: ``loss`` and ``gradient`` relative, ``parameter`` absolute after a few updates."""

    dtype: torch.dtype
    loss: float
    gradient: float
    parameter: float

    @classmethod
    def of(cls, dtype: torch.dtype, lr: float, given: float | None = None) -> Tolerance:
        """By the lowest precision that a model computes in; ``given`` replaces those of loss and gradients."""
        table = {torch.float64: (1e-10, 1e-8, 1e-4), torch.float32: (2e-6, 5e-5, 0.2)}
        loss, gradient, updates = table.get(dtype, (2e-2, 1e-1, 2.0))
        # AdamW moves an element by about lr whatever its gradient's size: a noisy sign is worth 2·lr, not less.
        return cls(dtype, given or loss, given or gradient, updates * lr)

    def gradient_floor(self, largest: float) -> float:
        """Below this size a gradient is rounding noise of the model's ``largest`` (as of a key's bias in attention)."""
        return NOISE * torch.finfo(self.dtype).eps * largest / self.gradient


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: ``difference`` against what is ``allowed``; inf where a tensor is missing or not a number."""

    kind: str
    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed

    @property
    def severity(self) -> float:
        return self.difference / self.allowed

    def __str__(self) -> str:
        missing = "is missing or not finite" if self.difference == inf else f"differs by {self.difference:.2e}"
        return f"{self.kind} {self.name} {missing} (allowed {self.allowed:.1e})"


def compare_values(kind: str, found: Sequence[float], truth: Sequence[float], allowed: float) -> list[Row]:
    """Relative differences of one number a step."""
    return [
        Row(kind, f"step {i}", _finite(abs(a - b) / max(abs(b), 1e-300)), allowed)
        for i, (a, b) in enumerate(zip(found, truth, strict=True))
    ]


def compare_tensors(
    kind: str, found: Mapping[str, Tensor], truth: Mapping[str, Tensor], allowed: Tolerance
) -> list[Row]:
    """The largest difference of each tensor: for gradients relative to its own largest element, else absolute."""
    if kind == "parameter":
        return [Row(kind, n, _distance(found.get(n), t), allowed.parameter) for n, t in truth.items()]
    floor = allowed.gradient_floor(max((_largest(t) for t in truth.values()), default=0.0))
    return [
        Row(kind, n, _distance(found.get(n), t) / max(_largest(t), floor, 1e-300), allowed.gradient)
        for n, t in truth.items()
    ]


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


def _distance(found: Tensor | None, truth: Tensor) -> float:
    if found is None or found.shape != truth.shape:
        return inf
    return _finite(_largest(found.to(truth.device, torch.float64) - truth.detach().double()))


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _finite(value: float) -> float:
    return inf if isnan(value) else value
