"""Abort process groups after an error, because pending collectives may never finish.

    NCCL    abort: kernels that wait for a peer end. To destroy the group instead would wait for them
    gloo    only its timeout ends a collective that waits for a peer, and the interpreter would wait for that before it
            ends. So the group is never taken down: the process ends at once, its connections close, and its peers hear

A process that an error ends without ``Engine.close`` or a ``with`` aborts its open groups on exit.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch.distributed import ProcessGroup

_open: dict[int, Callable[[BaseException | None], None]] = {}


def abort_groups(groups: Iterable[ProcessGroup], *, with_default: bool) -> None:
    """End ``groups``, or with the default group all there are, without a wait for anyone."""
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    every = list(dist.distributed_c10d._world.pg_map) if with_default else list(groups)
    for group in every:
        if "gloo" in dist.get_backend_config(group):
            _keep_for_ever(group)
    if with_default:
        abort(None)
        return
    for group in reversed(every):
        abort(group)


def abort_at_an_end(key: int, end: Callable[[BaseException | None], None]) -> None:
    """Call ``end`` when the interpreter ends, with the uncaught error that ends it; unless ``forget`` comes before."""
    _open[key] = end


def forget(key: int) -> None:
    """Do not call the function of ``key``: it was closed."""
    _open.pop(key, None)


@atexit.register
def _at_exit() -> None:
    for end in list(_open.values()):
        end(getattr(sys, "last_value", None))


def _keep_for_ever(group: ProcessGroup) -> None:
    """A reference that is never released: the destructor, which joins the threads of a gloo group, never runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
