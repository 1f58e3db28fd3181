"""Train a model by its plan on the bytes of a text; beside it, if asked, the same training in one process.

``train`` plans once here, so that bad input ends before any process starts, then runs ``run_rank`` on every rank:
started here, or by torchrun, where ``train`` itself is one of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from planner import plan
from planner.capture.model.reference import load_model, pretrained_directory
from planner.errors import PlanError, Where
from planner.spec.spec import Spec
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.cuda_graphs.choice import check_backend_here
from runtime.data.byte_batches import ByteBatches, read_text
from runtime.distributed.devices import launched
from runtime.distributed.launch import launch
from runtime.engine import Engine
from runtime.report.progress import Progress
from runtime.report.step_report import StepReport, StepRow
from runtime.verify.reference import OneProcess

TIMEOUT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank needs to know; the same on all of them."""

    model: str
    spec: str
    data: str
    num_steps: int
    compare: bool = False
    log: str | None = None


def train(job: Job, num_ranks: int | None = None, show_plan: Callable[[Any], None] | None = None) -> list[StepRow]:
    """Run the job and return its rows. ``num_ranks``: local processes to start; the plan's world size if not given.

    Raises PlanError for bad input, RankError when a rank fails.
    """
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        return run_rank(job)
    spec = Spec.load(job.spec)
    check_backend_here(spec)
    decided = plan(load_model(job.model), spec)
    if weights := pretrained_directory(job.model):
        check_pretrained(decided, weights)
    check_log(job.log)
    ByteBatches(read_text(job.data), spec.require_inputs(), spec.batch.global_size, spec.seed)
    world_size = decided.mesh.world_size
    if num_ranks is not None and num_ranks != world_size:
        raise PlanError(
            f"--nproc {num_ranks}, but the mesh takes {world_size} processes",
            where=spec.location("mesh"),
            fix=f"use --nproc {world_size}, or change the mesh",
        )
    if show_plan is not None:
        show_plan(decided)
    del decided
    if world_size == 1:
        return run_rank(job)
    return launch(run_rank, world_size, job, timeout_seconds=TIMEOUT_SECONDS)[0]


def run_rank(job: Job) -> list[StepRow]:
    """The training loop of one rank. Rank 0 shows progress, writes the log and returns the rows; the others nothing."""
    spec = Spec.load(job.spec)
    batches = ByteBatches(read_text(job.data), spec.require_inputs(), spec.batch.global_size, spec.seed)
    weights = pretrained_directory(job.model)
    model = load_model(job.model, materialize=weights is None, seed=spec.seed)
    leads = not launched(os.environ).rank
    decided = plan(model, spec)
    alone = _with_values(model, job, spec) if job.compare and leads else None
    del model
    rows = []
    progress = Progress(job.num_steps, job.log, enabled=leads, every_step=job.compare)
    with Engine(decided) as engine, progress:
        if weights is not None:
            engine.load_pretrained(weights)
        # after the engine has taken its weights: the one process trains the model itself
        beside = None if alone is None else OneProcess(alone, spec)
        is_behind = engine.groups.device.type != "cpu"  # a GPU works on the next step while this one's figures come
        waiting: list[tuple[int, StepReport, float | None]] = []
        for step in range(job.num_steps):
            batch = batches.batch(step)
            report = engine.train_step(batch)
            if leads:
                waiting.append((step + 1, report, beside.train_step(batch) if beside else None))
            while len(waiting) > (is_behind and step + 1 < job.num_steps):
                rows.append(_row(*waiting.pop(0)))
                progress.show(rows[-1])
    return rows


def _with_values(model: nn.Module, job: Job, spec: Spec) -> nn.Module:
    """``model`` where it holds values, else the whole of it from its directory, in the same mode."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    return load_model(job.model, materialize=True, seed=spec.seed).train(model.training)


def _row(step: int, report: StepReport, alone: float | None) -> StepRow:
    return StepRow(step, report.loss, report.grad_norm, report.lr, report.tokens_per_s, report.skipped, alone)


def check_log(log: str | None) -> None:
    """Raise PlanError if the log cannot be written; an old one is replaced."""
    if log is None:
        return
    try:
        Path(log).write_text("")
    except OSError as error:
        raise PlanError(
            f"cannot write the log: {error.strerror}", where=Where(file=log), fix="name a writable file"
        ) from error


def largest_difference(rows: list[StepRow]) -> float:
    """The largest |loss - loss of one process| over the steps."""
    return max((abs(r.loss - r.one_process_loss) for r in rows if r.one_process_loss is not None), default=0.0)
