"""A fault on purpose: one function of the runtime, a pass or the planner, replaced by a wrong one.

The ranks of a case are forks of the test's process: a function that is replaced there is wrong on every rank. The
reference is the user's model in plain PyTorch and calls none of these functions in the same way.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import torch.distributed as dist

from passes.ops.axis import AxisHandle
from runtime.distributed.groups import Groups

Function = Callable[..., Any]
Make = Callable[[Any], Any]
_GROUPS: list[Groups] = []


@dataclass(frozen=True, slots=True)
class Fault:
    """``make`` takes the function ``name`` of ``owner`` and returns a wrong one; ``seed``: of a case that finds it."""

    owner: Any
    name: str
    make: Make
    seed: int

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is there inside."""
        with pytest.MonkeyPatch.context() as patch:
            _replace(patch, Groups, "__post_init__", _noting)
            _replace(patch, self.owner, self.name, self.make)
            yield


def _replace(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Make) -> None:
    given, made = inspect.getattr_static(owner, name), make(getattr(owner, name))
    patch.setattr(owner, name, staticmethod(made) if isinstance(given, staticmethod) else made)


def _noting(whole: Function) -> Function:
    @wraps(whole)
    def noting(self: Groups) -> None:
        _GROUPS.append(self)
        whole(self)

    return noting


def groups_here() -> Groups:
    """Of the engine that this rank made last."""
    return _GROUPS[-1]


def other_group(group: Any) -> Any:
    """A process group of as many ranks, over another axis; ``group`` itself where there is none."""
    here = groups_here()
    for name in ("tp", "dp", "cp", "ep"):
        found = here.over(name)
        is_other = found is not None and dist.get_process_group_ranks(found) != dist.get_process_group_ranks(group)
        if is_other and dist.get_world_size(found) == dist.get_world_size(group):
            return found
    return group


def on_other_axis(axis: AxisHandle) -> AxisHandle:
    """``axis`` with the process group of another one."""
    handle = AxisHandle(axis.name, axis.size, axis.rank)
    handle.group = None if axis.group is None else other_group(axis.group)  # None: a plan's shapes are computed
    return handle
