"""Checks of values that only raise are assumptions of a plan: the captured forward is the one that does not raise.

    if (ids > n).any(): raise …          assert x.max() < 1          F.gaussian_nll_loss: no variance below 0

If the check reads only the batch and is small, the host evaluates it for each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from passes.errors import Where


@dataclass(frozen=True, slots=True)
class Condition:
    """``question``, of numbers that ``graph`` computes of ``inputs`` (by batch key, and dtype), has one ``answer``."""

    graph: fx.GraphModule
    inputs: tuple[tuple[str, torch.dtype], ...]
    symbols: tuple[sympy.Symbol, ...]
    question: Any
    answer: bool

    def holds(self, microbatch: Mapping[str, torch.Tensor]) -> bool:
        """Of one microbatch on the CPU."""
        with torch.no_grad():
            found = self.graph(*(microbatch[name].to(dtype) for name, dtype in self.inputs))
        values = {s: sympy.sympify(_number(value)) for s, value in zip(self.symbols, found, strict=True)}
        return bool(self.question.subs(values)) == self.answer

    def named(self, names: Sequence[str]) -> Condition | None:
        """With the batch keys ``names``, which come last, in place of positions; None if another value is read."""
        if any(int(position) < -len(names) for position, _ in self.inputs):
            return None
        return replace(self, inputs=tuple((names[int(position)], dtype) for position, dtype in self.inputs))


def _number(value: torch.Tensor) -> int | float:
    number = value.item()
    return int(number) if isinstance(number, bool) else number


@dataclass(frozen=True, slots=True)
class Assumption:
    """``condition``: by which a host checks each batch; None if it cannot."""

    where: Where
    what: str
    condition: Condition | None = None

    def __str__(self) -> str:
        checked = "checked on the host for each batch" if self.condition else "not checked during training"
        return f"assumed: {self.what}; {checked}"
