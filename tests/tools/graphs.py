"""Graphs for the tests of passes: a context without a captured model, and a stage of a tiny model before any pass."""

from __future__ import annotations

from typing import Any, cast

import torch

from passes.base import LowerContext
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from planner.decisions import PlanSource
from planner.placement.decide import Placements


def bare_context(placements: Placements | None = None, tp: int = 2, tp_rank: int = 0, seed: int = 0) -> LowerContext:
    """For passes that read the placements, the axis and the random state alone."""
    nothing = cast(Any, None)
    source = PlanSource(nothing, nothing, placements or Placements(tp, {}, {}), nothing, nothing, nothing, seed)
    handle = AxisHandle("tp", tp, tp_rank)
    return LowerContext(source, (), handle, RandomState(seed, tp_rank), torch.device("cpu"))
