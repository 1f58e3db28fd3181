"""The choice of a search: a cut, which decides the graph, and a layout, which is arithmetic on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.cost.layout import Layout
from planner.pipeline.schedule import KINDS
from planner.ranks import DEFAULT_ORDER

KINDS_OF_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """All that the graph of one stage depends on: each is decided once, on the captured model."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def has_expert_axes(self) -> bool:
        """Whether experts are cut otherwise than all else."""
        return self.ep > 1 or self.etp != self.tp

    def __str__(self) -> str:
        words = [f"tp {self.tp}"]
        words += [f"cp {self.cp}"] * (self.cp > 1)
        words += [f"ep {self.ep}", f"etp {self.etp}"] if self.has_expert_axes else []
        words += ["sequence parallel"] * self.sequence_parallel
        return ", ".join(words)


@dataclass(frozen=True)
class Point:
    """One layout of one cut. ``key`` breaks ties: fewer ranks that wait for each other, then less of everything."""

    cut: Cut
    layout: Layout

    @cached_property
    def key(self) -> tuple[Any, ...]:
        mesh, layout = self.layout.mesh, self.layout
        waits = (mesh.tp * mesh.cp > 1) * mesh.pp * mesh.vpp + (mesh.pp > 1) * mesh.vpp
        return (
            layout.num_microbatches * waits,
            self.cut,
            mesh.pp,
            mesh.vpp,
            KINDS_OF_RECOMPUTE.index(layout.recompute),
            layout.micro,
            layout.zero,
            layout.schedule,
            mesh.order != DEFAULT_ORDER,
            mesh.order,
        )

    @property
    def held(self) -> tuple[float, ...]:
        """Less of it, less memory: weights of a rank, then how much is kept of a microbatch."""
        mesh, layout = self.layout.mesh, self.layout
        recompute = -KINDS_OF_RECOMPUTE.index(layout.recompute)
        kept = layout.micro / (mesh.tp * mesh.cp)
        waits = KINDS[layout.schedule].waits
        return -mesh.tp * mesh.pp, -layout.zero, recompute, kept, not layout.sequence_parallel, waits, mesh.vpp

    @property
    def choices(self) -> dict[str, Any]:
        """The choices, by the names that reasons use; etp only where experts are cut otherwise than all else."""
        mesh, layout = self.layout.mesh, self.layout
        return {
            "tp": mesh.tp,
            "cp": mesh.cp,
            "ep": mesh.ep,
            **({"etp": mesh.etp} if self.cut.has_expert_axes else {}),
            "pp": mesh.pp,
            "vpp": mesh.vpp,
            "dp": mesh.dp,
            "micro": layout.micro,
            "recompute": layout.recompute,
            "zero": layout.zero,
            "sequence parallel": layout.sequence_parallel,
            "schedule": layout.schedule,
            "order": mesh.order,
        }

    def __str__(self) -> str:
        """``tp 8, pp 4 × 2 chunks, dp 2, micro 1, selective recompute``."""
        mesh, layout = self.layout.mesh, self.layout
        words = [str(self.cut), f"pp {mesh.pp}" + f" × {mesh.vpp} chunks" * (mesh.vpp > 1), f"dp {mesh.dp}"]
        words += [f"micro {layout.micro}"]
        words += [f"zero {layout.zero}"] * (layout.zero > 1)
        words += [f"{layout.recompute} recompute"] * (layout.recompute != "none")
        words += [layout.schedule] * (not KINDS[layout.schedule].is_default)
        words += [f"order {mesh.order}"] * (mesh.order != DEFAULT_ORDER)
        return ", ".join(words)
