"""The tensor-parallel axis as a collective in a graph sees it, and the precision in which ranks sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: torch.Tensor) -> bool:
    """Whether there is anything to exchange: meta tensors and fake ones have shapes alone, as planning runs the ops."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32 if it is of half precision: sums over ranks are taken in no less."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class AxisHandle:
    """One mesh axis as a lowered graph sees it: size and rank are known, the runtime binds the process group.

    Owns: the count of every collective that ran, by (kind, phase), for checks against the plan. ``phase``: overrides
    that of all calls while a backward recomputes a forward.
    """

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.name = name
        self.size = size
        self.rank = rank
        self.group: Any = None
        self.phase: str | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, phase: str, size: int) -> None:
        """Count one collective of ``size`` bytes."""
        phase = self.phase or phase
        self.counts[kind, phase] += 1
        self.bytes[kind, phase] += size

    def __repr__(self) -> str:
        return f"{self.name}[{self.rank}/{self.size}]"
