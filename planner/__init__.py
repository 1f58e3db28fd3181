"""The planner decides: a captured model and a spec become a frozen Plan. No process group, no device.

    from planner import plan, Plan, PlanError

``plan`` is the function, also where the module planner/plan.py was imported first; PyTorch is loaded at its first use,
so that the arithmetic rooms stay quick to import.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.shadow import refuse_shadows

refuse_shadows()

if TYPE_CHECKING:
    from planner.api import plan
    from planner.plan import Plan

__all__ = ["Plan", "PlanError", "plan"]


class _Package(ModuleType):
    """Importing planner/plan.py makes the import system set ``planner.plan`` to that module: here it stays the function."""

    @property
    def plan(self) -> Any:
        from planner.api import plan

        return plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        pass

    @property
    def Plan(self) -> Any:
        from planner.plan import Plan

        return Plan


sys.modules[__name__].__class__ = _Package
