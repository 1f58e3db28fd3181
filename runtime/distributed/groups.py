"""Process groups of the mesh: the ranks with which this rank reduces, gathers and exchanges boundaries.

``opening.py`` makes them; they end together after a barrier, or are aborted after an error, because pending collectives
may never finish:

    NCCL    abort ends kernels that wait for a peer; destroying the group would wait for them
    gloo    only its timeout ends a collective that waits for a peer, and the interpreter waits for that at exit. The
            group is therefore leaked: the process ends at once, which closes its connections, and its peers notice

A process that ends by an error without ``Engine.close`` or a ``with`` aborts its open groups at exit.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from planner.mesh import Mesh
from planner.pipeline.links import Link
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.faults import Faults

Name = str | tuple[int, ...] | Link  # an axis or several, the stages of a tied parameter, or a link


@dataclass(frozen=True, slots=True)
class RankMesh(Mesh):
    """The mesh as one rank sees it: sizes, and this rank's place on each axis (for a user's own DistributedSampler)."""

    rank: int = 0

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> RankMesh:
        return cls(**{f.name: getattr(mesh, f.name) for f in fields(Mesh)}, rank=rank)

    @property
    def tp_rank(self) -> int:
        return self.coordinate(self.rank)["tp"]

    @property
    def pp_rank(self) -> int:
        return self.coordinate(self.rank)["pp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinate(self.rank)["dp"]

    @property
    def dp_size(self) -> int:
        return self.dp


@dataclass
class Groups:
    """The process groups of one rank; a group of one rank is None.

    Owns: the default group if ``owns_default``, and every group in ``made``. ``world`` and the groups of the axes
    carry tensors of ``device`` over ``backend``; ``host`` carries host memory and Python objects over gloo, and is
    ``world`` if that does. ``by_name`` has all others: those over axes, the group of this rank's place on the other
    axes over the stages that hold a tied parameter, and links. ``place``: this rank's on each axis.
    ``faults``: this rank's activity, and its failure for others.
    ``before_end``: called before any group ends, in any way: frees objects that hold kernels of the groups. May be
    called again.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    timeout: timedelta
    owns_default: bool = False
    world: ProcessGroup | None = None
    host: ProcessGroup | None = None
    backend: str = "gloo"
    by_name: dict[Name, ProcessGroup] = field(default_factory=dict)
    made: list[ProcessGroup] = field(default_factory=list)
    faults: Faults = field(default_factory=lambda: Faults(Activity(0)))
    before_end: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinate = self.mesh.coordinate(self.rank)
        self.place = self.mesh.place(self.rank)
        self.faults.activity.name_after(self.rank, self.mesh.shown_place(self.rank))
        if self.world is not None:
            _open[id(self)] = self._end_with_the_process

    def rank_of_stage(self, stage: int) -> int:
        """Return the global rank that runs ``stage`` at this rank's tp, cp and dp."""
        return self.mesh.rank_of(**{**self.coordinate, "pp": self.mesh.pp_rank_of(stage)})

    def over(self, name: Name) -> Any:
        """Return this rank's group over an axis by its name in a plan, as ``dp-cp``; None for an axis of one rank."""
        return self.world if name == "world" else self.by_name.get(name)

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout of the groups made here, for calls from now on."""
        for group in [*self.made, *([self.world] if self.owns_default else [])]:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def in_users_code(self) -> AbstractContextManager[None]:
        """Return a context for a user's function between steps: after the timeout, the function fails at its line."""
        return self.faults.activity.in_users_code(self.timeout)

    def barrier(self) -> None:
        """Wait for all hosts, but not for devices."""
        if self.host is not None:
            dist.barrier(group=self.host)

    def close(self) -> None:
        """Wait for all ranks and end the groups made here; the user's own default group stays."""
        if self.world is None:
            return
        self.faults.closing()
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # no communicator ends before its queued work
            for release in self.before_end:
                release()
            self.barrier()
        except BaseException:
            self.abort()
            raise
        self.destroy()

    def destroy(self) -> None:
        if self.owns_default:
            dist.destroy_process_group()
        else:
            for group in self.made:
                dist.destroy_process_group(group)
        self._forget()

    def abort(self) -> None:
        """End the groups made here after an error, without waiting for ranks: running collectives may never end."""
        if self.world is not None:
            self._release_anyhow()
            abort_groups(self.made, with_default=self.owns_default)
            self._forget()

    def _end_with_the_process(self, error: BaseException | None) -> None:
        """End the groups at exit of the interpreter. ``error``: the uncaught error that ends it, None without one."""
        if error is not None:
            self.faults.publish(error)
            self.abort()
        self._release_anyhow()
        self.faults.close()

    def _release_anyhow(self) -> None:
        """Run ``before_end`` and ignore errors: a broken device fails here too, and the groups must still end."""
        for release in self.before_end:
            with suppress(Exception):
                release()

    def _forget(self) -> None:
        self.faults.close()
        _open.pop(id(self), None)
        self.world = self.host = None
        self.by_name, self.made, self.before_end = {}, [], []


# called at exit of the interpreter, with the uncaught error that ends it
_open: dict[int, Callable[[BaseException | None], None]] = {}


def abort_groups(groups: Iterable[ProcessGroup], *, with_default: bool) -> None:
    """Abort ``groups``, or with the default group all groups, without waiting for other ranks."""
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    every = list(dist.distributed_c10d._world.pg_map) if with_default else list(groups)
    for group in every:
        if "gloo" in dist.get_backend_config(group):
            # a leaked reference: the destructor, which joins the group's threads, never runs
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if with_default:
        abort(None)
        return
    for group in reversed(every):
        abort(group)


@atexit.register
def _at_exit() -> None:
    for end in list(_open.values()):
        end(getattr(sys, "last_value", None))
