"""The planner decides: a captured model and a spec become a frozen Plan. No process group, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.shadow import refuse_shadows

refuse_shadows()  # before the first import of a package of ours by its name

from passes.errors import PlanError  # noqa: E402

if TYPE_CHECKING:
    from passes.rules.own import rule
    from planner.api import capture, plan
    from planner.capture.model.meta_init import meta_parameters
    from planner.capture.own_loss import combine, with_loss
    from planner.captured import Captured
    from planner.frozen_plan import Plan

__all__ = ["Captured", "Plan", "PlanError", "capture", "combine", "meta_parameters", "plan", "rule", "with_loss"]

_HOMES = {
    "Captured": "planner.captured",
    "Plan": "planner.frozen_plan",
    "combine": "planner.capture.own_loss",
    "meta_parameters": "planner.capture.model.meta_init",
    "plan": "planner.api",
    "rule": "passes.rules.own",
    "with_loss": "planner.capture.own_loss",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import planner`` alone does not load PyTorch."""
    import importlib

    if name == "capture":  # a package of this name, which is callable
        return importlib.import_module("planner.capture")
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
