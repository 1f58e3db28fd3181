"""What a pass is: one signature, over a stage under construction and what the plan says of this rank.

    run(stage, context)      rewrites ``stage.graph``
    leaves                   what then holds of the graph: functions of passes/check.py, which the runner calls

The passes stand in one tuple (passes.lower.PASSES); a later one is one more entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from planner.decisions import PlanSource
from planner.tables.rows import CollectivePlan


@dataclass
class StageGraph:
    """A stage under construction. ``env``: captured name → node here."""

    index: int
    graph: fx.Graph
    root: nn.Module
    env: dict[str, fx.Node] = field(default_factory=dict)
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    denominators: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)  # captured placeholder → attribute
    buffers: dict[str, str] = field(default_factory=dict)
    has_loss: bool = False


@dataclass(frozen=True)
class LowerContext:
    """What a pass may read beside the stage: the decisions, the plan's rows of collectives, and this rank's handles."""

    source: PlanSource
    rows: tuple[CollectivePlan, ...]
    tp: AxisHandle
    random: RandomState
    device: torch.device


@dataclass(frozen=True)
class Violation:
    """What is not as a pass must leave it: at which node, what was expected there and what was found."""

    node: fx.Node | None
    expected: str
    found: str


Check = Callable[[StageGraph, LowerContext], Iterable[Violation]]


@dataclass(frozen=True)
class Pass:
    """One entry of the passes: the rewrite, and the facts that then hold."""

    run: Callable[[StageGraph, LowerContext], None]
    leaves: tuple[Check, ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__
