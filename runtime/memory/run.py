"""The command `memory`: start the plan's ranks, run a step, and compare measured with planned memory.

parameters, gradients, optimizer    the buffers that are held          within 1 %
whole                               full weights and gradients at once, if
                                    ranks keep shards of them          within 3 %
activations                         with logits: tensors that autograd saves for all microbatches in flight,
                                    at the planned peak                within 3 %
at the peak                         with working memory and messages: all live memory at the step's peak; reported
                                    without a bound: the backend decides when it frees a message
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from planner.capture.model.reference import load_to_plan, pretrained_directory
from planner.cost.memory import MemoryRow
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.compiled.compiler import check_compiler_here
from runtime.cuda_graphs.choice import check_backend_here
from runtime.distributed.launch import launch
from runtime.engine import Engine
from runtime.memory.evaluation import measured_evaluation
from runtime.memory.watch import MemoryWatch, Moment
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport, predicted_by_action
from runtime.shared_plan import Planned, planned, shared
from runtime.verify.batches import random_batch

TIMEOUT_SECONDS = 1800.0
ALLOWED = {"parameters": 0.01, "gradients": 0.01, "optimizer": 0.01, "activations": 0.03, "whole": 0.03}


class OfRank(NamedTuple):
    """The memory of one rank: by category, and by action of its schedule."""

    rows: list[Compared]
    actions: list[ActionMemory]


def compare_memory(
    model_ref: str, spec_path: str, *, evaluates: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> MemoryReport:
    """Start the plan's ranks here, each with its part of the model, and compare one step of each with the plan.

    ``evaluates``: an evaluation instead, by engines that hold nothing for training.
    Raises PlanError for bad input, RankError when a rank fails.
    """
    spec = Spec.load(spec_path)
    check_backend_here(spec)
    check_compiler_here(spec)
    made = planned(load_to_plan(model_ref, spec.seed), spec)
    rows = made.plan.evaluation_memory() if evaluates else made.plan.memory
    peaks = ", ".join(f"pp rank {row.pp_rank} {row.peak}" for row in rows)
    world_size, given = made.plan.mesh.world_size, (model_ref, spec_path, evaluates)
    if world_size == 1:
        found = [memory_of_rank(*given, made=made)]
    else:
        with shared(made.plan) as file:
            del made  # with the model: each rank builds its own
            found = launch(memory_of_rank, world_size, *given, file, timeout_seconds=timeout_seconds)
    compared = tuple(row for rank in found for row in rank.rows)
    return MemoryReport(compared, (f"peak: {peaks}",), tuple(action for rank in found for action in rank.actions))


def memory_of_rank(
    model_ref: str, spec_path: str, evaluates: bool = False, file: str | None = None, made: Planned | None = None
) -> OfRank:
    """This rank's part, on the CPU or the device that the launcher gave it. ``file``: of the launcher's plan;
    ``made``: the plan, if this process has it."""
    spec = Spec.load(spec_path)
    made = made or planned(load_to_plan(model_ref, spec.seed), spec, file)
    made.model, decided, weights = None, made.plan, pretrained_directory(model_ref)
    if evaluates:
        return OfRank(measured_evaluation(decided, random_batch(spec, decided, 0), weights), [])
    return measured(decided, [random_batch(spec, decided, seed) for seed in range(2)], weights)


def measured(decided: Plan, batches: Sequence[dict[str, Tensor]], weights: Path | None = None) -> OfRank:
    """The memory of this rank in the second step; libraries allocate lasting state in the first.

    ``weights``: a directory that the engine reads first.
    """
    rank = int(os.environ.get("RANK", "0"))
    with Engine(decided) as engine:
        if weights is not None:
            engine.load_pretrained(weights)
        engine.train_step(batches[0])
        outside = held_tensors(engine)
        watch = MemoryWatch(engine.executor, outside)
        engine.executor.around = watch.around
        engine.train_step(batches[1])
        row = decided.memory[engine.mesh.pp_rank]
        order = decided.schedule.actions[row.pp_rank]
        moments = watch.moments[-len(order) :]  # an audit evaluates before the step: forwards that keep nothing
        buffers = engine.optimizer.measured_bytes()
        rows = [*_held(rank, row, buffers, registered_bytes(engine)), *_activations(rank, row, moments)]
        rows += _whole(rank, row, engine)
        return OfRank(rows, _by_action(rank, row, predicted_by_action(row.of_microbatch, order), moments))


def held_tensors(engine: Engine) -> list[Tensor]:
    """The tensors that outlast a step: weights, gradient buffers, the model's own buffers and constants."""
    modules = [stage.module for stage in engine.program.stages]
    found = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for buffer in engine.optimizer.buffers.buffers:
        found += [*buffer.kept_parameters, *buffer.kept_gradients]
        found += [tensor for bucket in buffer.buckets for tensor in (bucket.parameters, bucket.gradients)]
    return found


def registered_bytes(engine: Engine) -> int:
    """Buffers, constants and the frozen parameters that no gradient buffer holds, each memory once in a stage."""
    laid_out = _sizes(tensor for buffer in engine.optimizer.buffers.buffers for tensor in buffer.kept_parameters)
    total = 0
    for stage in engine.program.stages:
        own = [*stage.module.buffers(), *(p for p in stage.module.parameters() if not p.requires_grad)]
        total += sum(size for memory, size in _sizes(own).items() if memory not in laid_out)
    return total


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each memory, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _held(rank: int, row: MemoryRow, buffers: dict[str, int], registered: int) -> list[Compared]:
    found = {
        "parameters": buffers["parameters"] + registered,
        "gradients": buffers["gradients"],
        "optimizer": buffers["optimizer"] + buffers["main_parameters"] + buffers["main_gradients"],
    }
    return [Compared(rank, name, getattr(row, name), size, ALLOWED[name]) for name, size in found.items()]


def _activations(rank: int, row: MemoryRow, moments: Sequence[Moment]) -> list[Compared]:
    there = next(moment for moment in moments if moment.action == row.peak)
    kept, live = row.activations + row.logits, max(moment.live for moment in moments)
    return [
        Compared(rank, "activations", kept, there.kept, ALLOWED["activations"]),
        Compared(rank, "at the peak", kept + row.working + row.communication, live),
    ]


def _whole(rank: int, row: MemoryRow, engine: Engine) -> list[Compared]:
    """Full weights and gradients, if ranks keep shards of them."""
    held = engine.optimizer.buffers
    most = held.weights.most_bytes + held.scattered.most_bytes
    return [Compared(rank, "whole", row.whole, most, ALLOWED["whole"])] if row.whole or most else []


def _by_action(rank: int, row: MemoryRow, kept: dict[str, int], moments: Sequence[Moment]) -> list[ActionMemory]:
    return [ActionMemory(rank, row.pp_rank, m.action, kept.get(m.action), m.kept, m.live) for m in moments]
