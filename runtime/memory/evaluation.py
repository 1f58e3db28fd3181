"""Measured memory of a rank that only evaluates, compared with the plan's forecast (``Plan.evaluation_memory``).

parameters      all tensors that the engine holds between calls     within 1 %
whole           full weights at once, if ranks keep shards          within 3 %
activations     with messages: all live memory at the peak of the
                forwards that evaluate and score a batch            within 3 %
keys and values that ``generate`` keeps, if it can keep them        within 1 %
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from passes.errors import PlanError
from planner.cost.evaluation import EvaluationMemory
from planner.frozen_plan import Plan
from planner.one_position import kept_bytes
from runtime.engine import Engine
from runtime.memory.watch import MemoryWatch
from runtime.pipeline.executor import Executor
from runtime.report.memory_rows import Compared

KEPT = "keys and values"
ALLOWED = {"parameters": 0.01, "activations": 0.03, "whole": 0.03, KEPT: 0.01}


def measured_evaluation(decided: Plan, batch: dict[str, Tensor], weights: Path | None = None) -> list[Compared]:
    """The rows of this rank, on the CPU or the device that the launcher gave it. ``weights``: a directory that the
    engine reads first."""
    rank = int(os.environ.get("RANK", "0"))
    with Engine(decided, mode="evaluate") as engine:
        if weights is not None:
            engine.load_pretrained(weights)
        engine.evaluate(batch)
        row = decided.evaluation_memory()[engine.mesh.pp_rank]
        most = _live(engine, engine.executor, batch)
        with suppress(PlanError):  # of a loss that gives no label a probability
            most = max(most, _live(engine, engine.scoring_executor(batch), batch, scores=True))
        return [*_compared(rank, row, engine, most), *_kept(rank, decided, engine)]


def _kept(rank: int, decided: Plan, engine: Engine) -> list[Compared]:
    """No row if no token can be generated, or nothing be kept: the same on every rank."""
    try:
        planned = kept_bytes(decided)[engine.mesh.pp_rank]
        return [Compared(rank, KEPT, planned, engine.kept_bytes(), ALLOWED[KEPT])]
    except PlanError:
        return []


def held_bytes(engine: Engine) -> int:
    """Bytes of all tensors that an engine keeps between calls: weights, buffers, gradients, optimizer state."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held_to_evaluate(engine)}
    state = engine.optimizer.measured_bytes()
    return sum(held.values()) + sum(state.values()) - state["parameters"]


def held_to_evaluate(engine: Engine) -> list[Tensor]:
    """The tensors that outlast a call; full weights of which ranks keep shards have no memory between calls."""
    modules = [stage.module for stage in engine.program.stages]
    gathered = {id(p) for b in engine.optimizer.buffers.buffers for s in b.slots.values() for p in s.parameters}
    found = [t for m in modules for t in (*m.parameters(), *m.buffers()) if id(t) not in gathered]
    return found + [t for buffer in engine.optimizer.buffers.buffers for t in buffer.kept_parameters]


def _live(engine: Engine, executor: Executor, batch: dict[str, Tensor], *, scores: bool = False) -> int:
    weights = [t for stage in executor.stages for t in (*stage.module.parameters(), *stage.module.buffers())]
    for buffer in engine.optimizer.buffers.buffers:
        weights += [bucket.parameters for bucket in buffer.buckets]
    watch = MemoryWatch(executor, [*weights, *held_to_evaluate(engine)])
    before, executor.around = executor.around, watch.around
    if scores:
        engine.score(batch)
    else:
        engine.evaluate(batch)
    executor.around = before
    return max(moment.live for moment in watch.moments)


def _compared(rank: int, row: EvaluationMemory, engine: Engine, most: int) -> list[Compared]:
    rows = [
        Compared(rank, "parameters", row.parameters, held_bytes(engine), ALLOWED["parameters"]),
        Compared(rank, "activations", row.activations + row.communication, most, ALLOWED["activations"]),
    ]
    whole = engine.optimizer.buffers.weights.most_bytes
    return [*rows, Compared(rank, "whole", row.whole, whole, ALLOWED["whole"])] if row.whole or whole else rows
