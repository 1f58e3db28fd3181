"""Ranks in one of three ways: threads that share a process, forks of one that planned, or processes of their own.

    Ranks(4).run(job)                          job(rank) on threads: collectives, no messages; 0.1 s
    Ranks(plan, "forks", host).run(job, …)     job(plan, …) on forks of a process of the laboratory: all of gloo; 0.5 s
    Ranks(4, "processes").run(job, …)          job(…) on processes that share nothing; 5 s

What a model over ranks is held against: tests/tools/simulated_mesh.py (threads), tests/tools/laboratory.py (forks).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from runtime.distributed.launch import launch
from tests.tools.limits import HANG_SECONDS

if TYPE_CHECKING:  # a process that is given a job loads this file, and needs none of them
    from planner import Plan
    from runtime.fuzz.forks import StoreHost


class Ranks:
    """As many as a plan has, or as are asked for. ``host``: what a process of the laboratory hands to its calls."""

    def __init__(
        self, of: Plan | int, how: Literal["threads", "forks", "processes"] = "threads", host: StoreHost | None = None
    ) -> None:
        self.of, self.how, self.host = of, how, host
        self.size = of if isinstance(of, int) else of.mesh.world_size

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank. A job of forks is given the plan first, one of threads its rank. Raises their error."""
        if self.how == "threads":
            return _on_threads(self.size, lambda rank: job(rank, *args))
        given = args if isinstance(self.of, int) else (self.of, *args)
        if self.host is not None:
            return self.host.run_ranks(self.size, job, *given)
        return launch(job, self.size, *given, timeout_seconds=HANG_SECONDS)


class _Threaded:
    """What is asked of the backend of such a group."""

    supports_coalescing = False


def _on_threads(size: int, run: Callable[[int], Any]) -> list[Any]:
    """Threads that are ranks of one default process group."""
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ProcessLocalGroup._get_backend = lambda self, device: _Threaded()  # pyright: ignore  # it knows none of a GPU
    world = _install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11 ends a list that its world of threads lacks
        world.comms = []  # pyright: ignore[reportAttributeAccessIssue]
    store = dist.HashStore()

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            results[rank] = run(rank)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    ProcessLocalGroup.reset()
    _uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise next((e for e in errors if not isinstance(e, SystemExit)), errors[0])
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return results
