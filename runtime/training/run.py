"""Train a model by its plan on a text, and, with --compare, in one process beside it.

``train`` plans first, so that bad input is refused before any process starts, then runs the loop on every rank: in
processes that it starts, or as a rank of torchrun. It also tries all output files first, so that none turns out to be
unwritable after hours.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from passes.errors import PlanError, Where
from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import adapter_directory, import_packages, pretrained_directory
from planner.files.atomic import try_new_file
from planner.files.text import shorten, writing
from planner.frozen_plan import Plan
from runtime.audit.audit import check_audit
from runtime.checkpoint.adapters import adapted_in, check_adapters
from runtime.checkpoint.manifest import MANIFEST
from runtime.checkpoint.merged import merged_without_values
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.checkpoint.saves import by_newest, check_writable, owned
from runtime.compiled.requirements import check_machine
from runtime.data.stream import is_stream
from runtime.distributed import early_server
from runtime.distributed.devices import launched
from runtime.distributed.launch import RankError, launch
from runtime.distributed.same_options import require_same_options
from runtime.profiling.profile import Window
from runtime.report.log import SUFFIXES, StepRow
from runtime.shared_plan import Planned, num_ranks_of, shared
from runtime.training.data import check_roles, check_source, check_stream, check_validation, run_data
from runtime.training.job import OWN, PLACES, Job, Trained, check_saves, plan_of, spec_of
from runtime.training.loop import run_rank
from runtime.training.options import AUTO
from runtime.training.showing import Callback, Samples, check_samples
from runtime.training.validation import check_best, check_metric, metric_of

TIMEOUT_SECONDS = 7 * 24 * 3600.0


def train(
    job: Job,
    num_ranks: int | None = None,
    show_plan: Callable[[Any], None] | None = None,
    max_restarts: int = 0,
    *,
    is_command: bool = False,
) -> Trained:
    """Run the job on all ranks and return the result of rank 0; under torchrun, run this process's rank.

    ``num_ranks``: local processes to start, by default the plan's world size. ``show_plan``: called with the plan.
    ``max_restarts``: number of times that all ranks are restarted after a failure, to resume from the last save.
    ``is_command``: this process has done nothing else before, so that ranks may be forked from it. Raises PlanError for
    bad input, RankError when a rank fails.
    """
    if "RANK" in os.environ or launched(os.environ).world_size > 1:
        refuse_of_launcher(num_ranks, show_plan, max_restarts)
        leads = not launched(os.environ).rank
        outputs = partial(check_outputs, job) if leads else None
        require_same_options(job, own=OWN, places=PLACES, timeout_seconds=job.timeout, check=outputs)
        return run_rank(job)
    world_size, own_plan = _checked(job, num_ranks, show_plan, is_command=is_command)
    if world_size == 1 and not max_restarts:
        return run_rank(job, own_plan)
    with shared(own_plan.plan, is_saved=job.plan is not None) as file:
        del own_plan  # and the model: each rank builds its own
        if not file and job.plan is None:
            early_server.end()  # ranks capture too, and share the imports of a new server
        return _launched(replace(job, planned=file), world_size, max_restarts)


def refuse_of_launcher(num_ranks: int | None, show_plan: object, max_restarts: int) -> None:
    """Raise PlanError for an option that a rank of torchrun would ignore: it starts no processes and prints no plan."""
    fixes = {
        "--nproc": (num_ranks, "remove --nproc: the launcher sets the number of processes"),
        "--show-plan": (show_plan, "remove --show-plan, and print the plan with `meshwright plan MODEL SPEC`"),
        "--max-restarts": (max_restarts, "give --max-restarts to torchrun, before -m runtime.cli"),
    }
    for option, (value, fix) in fixes.items():
        if value:
            raise PlanError(f"{option} has no effect under a launcher such as torchrun", where=option, fix=fix)


def _launched(job: Job, world_size: int, max_restarts: int) -> Trained:
    signals: list[int] = []
    before = _newest(job)
    options: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS, "max_restarts": max_restarts}
    try:
        trained: Trained = launch(run_rank, world_size, job, on_stop=signals.append, **options)[0]
    except RankError:
        newest = _newest(job)  # a save from before the run belongs to it only with ``auto``
        if newest is not None and (newest != before or job.resume == AUTO):
            print(f"the newest save is {newest[0]}: --resume auto resumes from it", file=sys.stderr, flush=True)
        raise
    return replace(trained, stopped=signals[0]) if signals and trained.stopped else trained


def _checked(
    job: Job, num_ranks: int | None, show_plan: Callable[[Any], None] | None, *, is_command: bool
) -> tuple[int, Planned]:
    """Return the number of ranks, and the plan. Raises PlanError for all bad input that can be found without ranks."""
    check_saves(job)
    if job.save is not None:
        with owned(job.save):  # a run that already uses the directory is reported here, before ranks start
            pass
    spec = spec_of(job)
    check_machine(spec)
    check_source(job)
    if is_stream(job.data):
        check_stream(job, spec)
    else:
        check_roles(job, spec)
    check_validation(job, spec)
    check_samples(job, spec)
    check_metric(job, spec)
    _check_directories(job)
    if is_command:
        import_packages(job.model)
        early_server.begin()
    check_outputs(job)  # runs the file of a callback
    needs_adapters = job.save_adapters is not None or job.save_merged is not None
    own = plan_of(job, spec, lambda model: needs_adapters and adapted_in(hub_format(model)))
    decided = own.plan
    if spec.audit.every is not None:
        check_audit(decided)
    if weights := pretrained_directory(job.model):
        check_pretrained(decided, weights)
    _check_adapters(job, decided)
    run_data(job, spec, decided)
    Samples(job, spec, decided, leads=False)
    metric_of(job, spec, decided)
    world_size = num_ranks_of(decided, spec, num_ranks)
    if show_plan is not None:
        show_plan(decided)
    return world_size, own


def _check_directories(job: Job) -> None:
    """Raise PlanError for conflicting options about adapters, or a directory that cannot be written."""
    if adapter_directory(job.model) is not None and job.compare:
        fix = "leave out --compare, or name the adapter_config.json alone"
        what = "--compare starts from new adapters, but --peft names trained ones"
        raise PlanError(what, where="--compare", fix=fix)
    for directory in filter(None, (job.save_adapters, job.save_merged)):
        check_writable(directory)


def _check_adapters(job: Job, decided: Plan) -> None:
    """Raise PlanError for adapters that do not fit the plan."""
    if job.save_adapters is not None or job.save_merged is not None:
        adapted_in(decided.hub)
    if job.save_merged is not None:
        merged_without_values(adapted_in(decided.hub))
    if (trained := adapter_directory(job.model)) is not None:
        check_adapters(decided, trained)


def _newest(job: Job) -> tuple[Path, int] | None:
    """Return the save that ``--resume auto`` would use, and the time at which it was written."""
    with suppress(OSError, PlanError):
        saves = by_newest(job.save)[0] if job.save is not None else []
        return (saves[0], (saves[0] / MANIFEST).stat().st_mtime_ns) if saves else None
    return None


def largest_difference(rows: list[StepRow]) -> float:
    """Return the largest |loss - loss of one process| over the steps."""
    return max((abs(r.loss - r.one_process_loss) for r in rows if r.one_process_loss is not None), default=0.0)


def check_outputs(job: Job) -> None:
    """Raise PlanError for a file or directory that cannot be written, or a missing package."""
    if job.log is not None:  # appending keeps the steps of an earlier run, which the log reads later
        with writing("the log", Where(file=job.log)):
            Path(job.log).open("a").close()
    if job.plot is not None:
        _check_package("matplotlib", "--plot", "plot")
        if Path(job.plot).suffix.lower() not in SUFFIXES:
            what = f"{job.plot} is not a supported image format"
            raise PlanError(what, where="--plot", fix=f"use a name that ends in {', '.join(SUFFIXES)}")
        _check_replaceable(job.plot, "the picture")
    if job.tensorboard is not None:
        _check_package("tensorboard", "--tensorboard", "tensorboard")
        with writing(f"the directory {shorten(job.tensorboard)}", "--tensorboard", "give a writable directory"):
            os.makedirs(job.tensorboard, exist_ok=True)
            try_new_file(Path(job.tensorboard) / "try")
    if job.wandb is not None:
        _check_package("wandb", "--wandb")
        if not re.fullmatch(r"[^/\\#?%:]{1,128}(/[^/]+)?", job.wandb):
            what = f"--wandb {shorten(job.wandb, 60)} is not PROJECT or PROJECT/NAME"
            raise PlanError(what, where="--wandb", fix="write --wandb my-project/first-try")
    if job.callback is not None:
        Callback(job.callback)
    check_best(job)
    if job.profile is not None:
        Window.parse(job.profile, job.num_steps)
        _check_replaceable(job.trace, "the trace")
    elif job.profile_to is not None:
        fix = "add --profile STEPS"
        raise PlanError("--profile-to names a file for a trace, but no step is profiled", where="--profile-to", fix=fix)


def _check_replaceable(path: str, what: str) -> None:
    """Raise PlanError unless a new file can be written beside ``path``, and replace it when it is complete."""
    target = Path(os.path.realpath(path))
    with writing(what, Where(file=path)):
        if target.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        try_new_file(target)


def _check_package(name: str, option: str, extra: str | None = None) -> None:
    if importlib.util.find_spec(name) is None:
        wanted = name if extra is None else f"'meshwright[{extra}]'"
        what = f"{option} needs the package {name}, which is not installed"
        raise PlanError(what, where=option, fix=f"pip install {wanted}, or remove {option}")
