"""The runtime runs: process groups, the schedule executor, ZeRO-1. It decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.shadow import refuse_shadows

refuse_shadows()

if TYPE_CHECKING:
    from runtime.engine.engine import Engine
    from runtime.report.step_report import StepReport

__all__ = ["Engine", "StepReport"]

_HOMES = {"Engine": "runtime.engine.engine", "StepReport": "runtime.report.step_report"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
