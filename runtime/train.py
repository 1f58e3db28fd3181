"""Train a model by its plan on the bytes of a text; beside it, if asked, the same training in one process.

``train`` plans once here, so that bad input ends before any process starts, then runs the loop on every rank: in
processes that it starts, or as one of the ranks of torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from passes.errors import PlanError
from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import import_packages, pretrained_directory
from planner.capture.model.with_adapters import adapter_directory
from planner.frozen_plan import Plan
from planner.spec.sections import MeshSpec
from runtime.audit.audit import check_audit
from runtime.checkpoint.adapters_load import check_adapters
from runtime.checkpoint.adapters_save import adapted_in, adapted_of
from runtime.checkpoint.manifest import MANIFEST
from runtime.checkpoint.merged_save import check_merge
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.checkpoint.saves import by_newest, check_writable, owned
from runtime.compiled.compiler import check_compiler_here
from runtime.cuda_graphs.choice import check_backend_here
from runtime.data.stream import is_stream
from runtime.distributed import early_server
from runtime.distributed.devices import launched
from runtime.distributed.launch import RankError, launch
from runtime.distributed.num_ranks import num_ranks_of
from runtime.distributed.same_options import require_same_options
from runtime.distributed.this_host import check_host
from runtime.report.step_row import StepRow
from runtime.shared_plan import Planned, shared
from runtime.training.data import check_roles, check_source, check_stream, check_validation, run_data
from runtime.training.job import AUTO, OWN, PLACES, Job, Trained, check_saves, spec_of
from runtime.training.loop import run_rank
from runtime.training.outputs import check_outputs
from runtime.training.planned import plan_of
from runtime.training.samples import Samples, check_samples

TIMEOUT_SECONDS = 7 * 24 * 3600.0


def train(
    job: Job,
    num_ranks: int | None = None,
    show_plan: Callable[[Any], None] | None = None,
    max_restarts: int = 0,
    *,
    is_command: bool = False,
) -> Trained:
    """Run the job. ``num_ranks``: local processes to start; the plan's world size if not given.

    ``max_restarts``: how often all ranks are restarted after a failure, to resume from the last save. ``is_command``:
    this process has done nothing before, and ranks may be forked from it. Raises PlanError for bad input, RankError
    when a rank fails.
    """
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        leads = not launched(os.environ).rank
        outputs = partial(check_outputs, job) if leads else None
        require_same_options(job, own=OWN, places=PLACES, timeout_seconds=job.timeout, check=outputs)
        return run_rank(job)
    world_size, made = _checked(job, num_ranks, show_plan, is_command=is_command)
    if world_size == 1 and not max_restarts:
        return run_rank(job, made)
    with shared(made.plan, is_saved=job.plan is not None) as file:
        del made  # with the model: each rank builds its own
        if not file and job.plan is None:
            early_server.end()  # ranks capture: all that they import is to be imported once
        return _launched(replace(job, planned=file), world_size, max_restarts)


def _launched(job: Job, world_size: int, max_restarts: int) -> Trained:
    signals: list[int] = []
    before = _newest(job)
    options: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS, "max_restarts": max_restarts}
    try:
        trained: Trained = launch(run_rank, world_size, job, on_stop=signals.append, **options)[0]
    except RankError:
        _tell_how_to_go_on(job, before)
        raise
    return replace(trained, stopped=signals[0]) if signals and trained.stopped else trained


def _checked(
    job: Job, num_ranks: int | None, show_plan: Callable[[Any], None] | None, *, is_command: bool
) -> tuple[int, Planned]:
    """The number of ranks, and the plan. Raises PlanError for all that is known to be wrong before a process starts."""
    check_saves(job)
    if job.save is not None:
        with owned(job.save):  # a run that already uses the directory is reported here, before ranks start
            pass
    spec = spec_of(job)
    check_backend_here(spec)
    check_compiler_here(spec)
    check_source(job)
    if is_stream(job.data):
        check_stream(job, spec)
    else:
        check_roles(spec)
    check_validation(job, spec)
    check_samples(job, spec)
    _check_directories(job)
    if spec.mesh != MeshSpec():  # several ranks
        check_host()
    if is_command:
        import_packages(job.model)
        early_server.begin()
    check_outputs(job)  # runs the file of a callback
    made = plan_of(job, spec, lambda model: _check_model(job, model))
    decided = made.plan
    if spec.audit.every is not None:
        check_audit(decided)
    if weights := pretrained_directory(job.model):
        check_pretrained(decided, weights)
    _check_adapters(job, decided)
    run_data(job, spec, decided)
    Samples(job, spec, decided, leads=False)
    world_size = num_ranks_of(decided, spec, num_ranks)
    if show_plan is not None:
        show_plan(decided)
    return world_size, made


def _check_directories(job: Job) -> None:
    """Raise PlanError for options about adapters that do not go together, or a directory that cannot be written."""
    if adapter_directory(job.model) is not None and job.compare:
        fix = "leave out --compare, or name the adapter_config.json alone"
        raise PlanError("--compare begins with new adapters, --peft names trained ones", where="--compare", fix=fix)
    for directory in filter(None, (job.save_adapters, job.save_merged)):
        check_writable(directory)


def _check_model(job: Job, model: nn.Module) -> None:
    """Raise PlanError if an option needs adapters that the model does not have."""
    if job.save_adapters is not None or job.save_merged is not None:
        adapted_in(hub_format(model))


def _check_adapters(job: Job, decided: Plan) -> None:
    """Raise PlanError for adapters that do not fit the plan."""
    if job.save_adapters is not None or job.save_merged is not None:
        adapted_of(decided)
    if job.save_merged is not None:
        check_merge(decided)
    if (trained := adapter_directory(job.model)) is not None:
        check_adapters(decided, trained)


def _newest(job: Job) -> tuple[Path, int] | None:
    """The save that ``--resume auto`` takes, and when it was written."""
    with suppress(OSError, PlanError):
        saves = by_newest(job.save)[0] if job.save is not None else []
        return (saves[0], (saves[0] / MANIFEST).stat().st_mtime_ns) if saves else None
    return None


def _tell_how_to_go_on(job: Job, before: tuple[Path, int] | None) -> None:
    """``before``: the newest save when the run began; if it still is, it belongs to this run only with ``auto``."""
    newest = _newest(job)
    if newest is not None and (newest != before or job.resume == AUTO):
        print(f"the newest save is {newest[0]}: --resume auto resumes from it", file=sys.stderr, flush=True)


def largest_difference(rows: list[StepRow]) -> float:
    """The largest |loss - loss of one process| over the steps."""
    return max((abs(r.loss - r.one_process_loss) for r in rows if r.one_process_loss is not None), default=0.0)
