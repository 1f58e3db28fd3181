"""Arguments with a first dim of any length, for a compiler: rows of experts, of which each step has another number.

The length is a symbol of PyTorch's shape environment. Inductor may assume something of it, such as that indices fit in
32 bits: its guards, which are read once it has compiled both directions, and checked before each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

_KNOWN_LENGTHS = 4096


class AnyRows:
    """Arguments without values that share one symbol, and have the strides of ``examples``. Owns its environment."""

    def __init__(self, examples: Sequence[Tensor], counts_rows: Sequence[bool]) -> None:
        self._environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=self._environment)
        pairs = list(zip(examples, counts_rows, strict=True))
        rows = next(x.shape[0] for x, counts in pairs if counts)
        free: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        self._length: Any = mode.from_tensor(torch.empty(rows), symbolic_context=free).shape[0]
        with mode:
            self.arguments = [_like(x, (self._length, *x.shape[1:]) if counts else x.shape) for x, counts in pairs]
        self._guards: str | None = None
        self.fits = lru_cache(_KNOWN_LENGTHS)(self._fits)

    def settle(self) -> None:
        """Read the guards; no more are added."""
        self._guards = self._environment.produce_guards_expression([self._length])

    def _fits(self, rows: int) -> bool:
        """Whether the compiled function computes that many rows."""
        return self._guards is None or bool(self._environment.evaluate_guards_expression(self._guards, [rows]))


def _like(x: Tensor, shape: Any) -> Any:
    return torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
