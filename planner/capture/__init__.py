"""A model and one microbatch become a canonical program.

Begin at `export`. All changes of torch while a forward runs are `passes.interceptors`; `functional` brings the exported
graph into the form that passes read. `resized` compares a second capture at another batch size with the first.
"""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """``planner.capture`` is this package and the function of ``planner.api``: Python has one name for both."""

    def __call__(self, model: Any, spec: Any, example_inputs: Mapping[str, Any] | None = None) -> Any:
        return importlib.import_module("planner.api").capture(model, spec, example_inputs)


sys.modules[__name__].__class__ = _Room
