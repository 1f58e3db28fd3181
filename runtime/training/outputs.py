"""The files that a run will write, tried before it starts: none is found to be unwritable after hours."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from passes.errors import PlanError, Where
from planner.files.atomic import try_new_file
from runtime.profiling.window import Window
from runtime.report.curve import SUFFIXES
from runtime.training.best import check_best
from runtime.training.callback import Callback
from runtime.training.job import Job
from runtime.training.validation import Metric


def check_outputs(job: Job) -> None:
    """Raise PlanError for a file or directory that cannot be written, or a package that is needed and missing."""
    _check_log(job)
    if job.plot is not None:
        _check_package("matplotlib", "--plot", "plot")
        if Path(job.plot).suffix.lower() not in SUFFIXES:
            raise PlanError(
                f"{job.plot} is not a supported image format",
                where="--plot",
                fix=f"use a name that ends in {', '.join(SUFFIXES)}",
            )
        _check_replaceable(job.plot, "picture")
    if job.tensorboard is not None:
        _check_package("tensorboard", "--tensorboard", "tensorboard")
        _check_directory(job.tensorboard)
    if job.wandb is not None:
        _check_package("wandb", "--wandb")
    if job.callback is not None:
        Callback(job.callback)
    if job.metric is not None:
        Metric(job.metric)
    check_best(job)
    if job.profile is not None:
        Window.parse(job.profile, job.num_steps)
        _check_replaceable(job.trace, "trace")
    elif job.profile_to is not None:
        fix = "add --profile STEPS"
        raise PlanError("--profile-to names a file for a trace, but no step is profiled", where="--profile-to", fix=fix)


def _check_log(job: Job) -> None:
    """Keeps the file's content: once training begins, the log itself finds the steps of an earlier run."""
    if job.log is None:
        return
    try:
        Path(job.log).open("a").close()
    except OSError as error:
        raise _cannot_write("log", job.log, error) from error


def _check_replaceable(path: str, what: str) -> None:
    """The old file stays until the new one, written beside it, is complete."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        try_new_file(target)
    except OSError as error:
        raise _cannot_write(what, path, error) from error


def _check_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        try_new_file(Path(path) / "try")
    except OSError as error:
        raise _cannot_write("directory for TensorBoard", path, error) from error


def _check_package(name: str, option: str, extra: str | None = None) -> None:
    if importlib.util.find_spec(name) is None:
        wanted = name if extra is None else f"'meshwright[{extra}]'"
        raise PlanError(
            f"{option} needs the package {name}, which is not installed",
            where=option,
            fix=f"pip install {wanted}, or remove {option}",
        )


def _cannot_write(what: str, path: str, error: OSError) -> PlanError:
    return PlanError(f"cannot write the {what}: {error.strerror}", where=Where(file=path), fix="give a writable file")
