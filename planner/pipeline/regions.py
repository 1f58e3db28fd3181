"""The parts of a block that a CUDA graph may capture. None is planned yet: the row stands in the format of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """A part of a block that a CUDA graph captures, or the reason why it does not; inputs and outputs are names."""

    block: str
    scope: str
    captured: bool
    reason: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
