"""The planner decides: a captured model and a spec become a frozen Plan. No process group, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.shadow import refuse_shadows

refuse_shadows()

if TYPE_CHECKING:
    from planner.api import plan
    from planner.capture.model.meta_init import meta_parameters
    from planner.frozen_plan import Plan

__all__ = ["Plan", "PlanError", "meta_parameters", "plan"]

_HOMES = {"plan": "planner.api", "Plan": "planner.frozen_plan", "meta_parameters": "planner.capture.model.meta_init"}


def __getattr__(name: str) -> Any:
    """``from planner import plan`` loads PyTorch only then: the arithmetic rooms stay quick to import."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
