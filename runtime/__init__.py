"""The runtime runs: process groups, the schedule executor, ZeRO-1. It decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.report import StepReport

__all__ = ["Engine", "StepReport"]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line reads this package long before it needs an engine."""
    if name == "Engine":
        from runtime.engine import Engine

        return Engine
    if name == "StepReport":
        from runtime.report import StepReport

        return StepReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
