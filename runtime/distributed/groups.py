"""What the mesh is as process groups: which ranks this rank reduces, gathers and exchanges boundaries with.

``opening.py`` makes them; they end together, after a wait for all ranks, or at once after an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from planner.mesh import Mesh
from runtime.distributed.abort import abort_at_a_failed_end, abort_groups, forget


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

    Owns: the default group where ``owns_default``, and every group in ``made``. ``world`` and the groups of the axes
    carry tensors of ``device`` over ``backend``; ``host`` carries host memory and Python objects over gloo, and is
    ``world`` where that does. ``embedding`` maps the stages that hold a tied parameter to the group of this rank's tp
    and dp coordinate over them.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    timeout: timedelta
    owns_default: bool = False
    world: ProcessGroup | None = None
    host: ProcessGroup | None = None
    backend: str = "gloo"
    tp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    embedding: dict[tuple[int, ...], ProcessGroup | None] = field(default_factory=dict)
    links: dict[tuple[int, int, str], ProcessGroup] = field(default_factory=dict)
    made: list[ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinate = self.mesh.coordinate(self.rank)
        if self.world is not None:
            abort_at_a_failed_end(id(self), self.abort)

    @property
    def tp_rank(self) -> int:
        return self.coordinate["tp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinate["dp"]

    @property
    def pp_rank(self) -> int:
        return self.coordinate["pp"]

    def rank_of_stage(self, stage: int) -> int:
        """The global rank that runs ``stage`` at this rank's tp and dp coordinate: chunk c of pp rank r is c·pp + r."""
        return self.mesh.rank_of(**{**self.coordinate, "pp": stage % self.mesh.pp})

    def barrier(self) -> None:
        """Of the hosts: what devices still compute is not waited for."""
        if self.host is not None:
            dist.barrier(group=self.host)

    def close(self) -> None:
        """Wait for all ranks and end the groups made here; the user's own default group stays."""
        if self.world is None:
            return
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # no communicator ends under what its queue still holds
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
        """End the groups made here after an error, without a wait for anyone: what is under way may never end."""
        if self.world is not None:
            abort_groups(self.made, with_default=self.owns_default)
            self._forget()

    def _forget(self) -> None:
        forget(id(self))
        self.world = self.host = self.tp = self.dp = self.pp = None
        self.embedding, self.links, self.made = {}, {}, []


def default_store() -> Store | None:
    """The key-value store behind the default group; None for a rank alone."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
