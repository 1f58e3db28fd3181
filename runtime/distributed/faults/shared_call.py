"""A method that all ranks call together: an error inside names the rank, the step and the activity."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def shared_call(phase: str) -> Callable[[Method], Method]:
    """For methods of what has ``groups.faults`` and ``step_index``.

    ``phase``: what errors call it, until the method says something finer.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with self.groups.faults.during(phase, self.step_index):
                return method(self, *args, **options)

        return cast(Method, call)

    return decorate
