"""A method that all ranks call together: an error inside names the rank, the step and the activity."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def shared_call(phase: str) -> Callable[[Method], Method]:
    """For methods of a class with ``groups.faults`` and ``step_index``.

    ``phase``: its name in errors, until the method sets a finer one.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with self.groups.faults.during(phase, self.step_index):
                return method(self, *args, **options)

        return cast(Method, call)

    return decorate
