"""The public names: what your code may rely on between releases (docs/stability.md).

    from meshwright import Engine, plan

Importing this package loads neither torch nor anything else: each name is imported when it is first read. Type
checkers read __init__.pyi.
"""

from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "Captured": "planner.captured",
    "Engine": "runtime.engine.engine",
    "Plan": "planner.frozen_plan",
    "PlanError": "passes.errors",
    "RankError": "runtime.distributed.launch",
    "RunError": "passes.errors",
    "Spec": "planner.spec.spec",
    "StepReport": "runtime.report.step_report",
    "build_schedule": "planner.pipeline.schedule",
    "capture": "planner.api",
    "combine": "planner.capture.own_loss",
    "find_layouts": "planner.api",
    "meta_parameters": "planner.capture.model.meta_init",
    "parse_schedule": "planner.pipeline.simulate",
    "plan": "planner.api",
    "rule": "passes.rules.own",
    "with_loss": "planner.capture.own_loss",
}

__all__ = [
    "Captured",
    "Engine",
    "Plan",
    "PlanError",
    "RankError",
    "RunError",
    "Spec",
    "StepReport",
    "build_schedule",
    "capture",
    "combine",
    "find_layouts",
    "meta_parameters",
    "parse_schedule",
    "plan",
    "rule",
    "with_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    import importlib

    from meshwright.shadow import refuse_shadows

    refuse_shadows()
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
