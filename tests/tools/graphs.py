"""Graphs for the tests of passes: a context without a captured model, and a stage of a tiny model before any pass."""

from typing import Any, cast

import torch

from passes.base import LowerContext, StageGraph, text_of
from passes.lower import PASSES, extract, run_passes
from passes.lowering import Lowering
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.partition.type_changes import Placements
from planner import Plan
from planner.lower import context_of, passes_text


def bare_context(placements: Placements | None = None, tp: int = 2, tp_rank: int = 0, seed: int = 0) -> LowerContext:
    """For passes that read the placements, the axis and the random state alone."""
    nothing = cast(Any, None)
    lowering = Lowering(nothing, placements or Placements(tp, {}, {}), nothing, nothing)
    handle = AxisHandle("tp", tp, tp_rank)
    return LowerContext(lowering, handle, RandomState(seed, tp_rank), torch.device("cpu"))


def stage_after(plan: Plan, last: str, rank: int = 0, chunk: int = 0) -> StageGraph:
    """A stage of ``rank`` once the pass ``last`` has run ("extract": before any)."""
    context, indices = context_of(plan, rank, torch.device("cpu"), thorough=True)
    stage = extract(context, indices[chunk])
    names = ["extract", *(step.name for step in PASSES)]
    run_passes(stage, context, PASSES[: names.index(last)])
    return stage


def shown(stage: StageGraph) -> str:
    """The graph, a line a node."""
    return "\n".join(text_of(node) for node in stage.graph.nodes) + "\n"


def change_of(plan: Plan, name: str, rank: int = 0) -> str:
    """What the pass ``name`` printed for a rank with one stage."""
    lines = passes_text(plan, rank).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"  {name} "))
    rest = lines[first + 1 :]
    length = next((i for i, line in enumerate(rest) if not line.startswith("    ")), len(rest))
    return "\n".join(line.strip() for line in [lines[first], *rest[:length]]) + "\n"
