"""The command ``meshwright train``.

``LaunchOptions`` are read by the launching process alone, those of ``runtime.training.options`` by the ranks.
``job_of`` combines both into the job of the ranks.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from passes.errors import PlanError
from planner.commands.cli import Model, Peft, SpecFile, show_plan, write_text
from planner.commands.command_group import PROCESS
from runtime.options import NumRanks, flag, option, takes
from runtime.training.options import TrainOptions, saves_directory

if TYPE_CHECKING:
    from runtime.training.job import Job

CHECK_FAILED = 1
INTERRUPTED = 130
EPILOG = (
    "Examples: meshwright train examples/gpt.py:build examples/gpt.yaml --data stdlib --steps 30 --nproc 4 "
    "· torchrun --nnodes 2 --nproc-per-node 8 … -m runtime.cli train MODEL SPEC --data text.txt"
)
MOST_EPOCHS = 1e6
DEFAULT_STEPS = 100


@dataclass(frozen=True)
class LaunchOptions:
    """Options that the ranks do not read, or read in another form."""

    data: list[str] | None = option(
        "Token file, text file or directory, stdlib (Python's own source), or a function of (rank, size) that returns "
        "a stream. For a mixture, repeat it as PATH=SHARE. Default: data.mixture of the spec.",
        "PATH|stdlib|FILE.py:FUNCTION",
    )
    steps: int | None = option("Number of updates; default: 100.", min=1)
    epochs: float | None = option("Number of passes over the data, instead of --steps.", "E")
    nproc: NumRanks = None
    max_restarts: int = option("Restart all ranks after a failure, at most N times.", "N", default=0, min=0)
    secret_file: Path | None = option(
        "File with a secret that all hosts share; ranks sign their entries in the rendezvous store with it.", "FILE"
    )
    peft: Peft = None
    show_plan: bool = flag("Print the plan first.")
    validation_data: list[str] | None = option(
        "Text or token file to validate on; may be repeated. --keep-best and --patience follow the first.",
        "NAME=FILE",
    )
    sample_prompt: list[str] | None = option("A text for --sample-every to continue; may be repeated.", "TEXT")


def job_of(model: str, spec: Path, launch: LaunchOptions, options: TrainOptions) -> Job:
    """Return the job of the ranks. Raises PlanError for options that do not fit together."""
    from planner.capture.model.reference import named
    from runtime.training.data import mixture_of_spec, named_files, read_mixture, steps_of
    from runtime.training.job import Job

    data, mixture = read_mixture(launch.data) if launch.data else mixture_of_spec(str(spec))
    steps = DEFAULT_STEPS if launch.steps is None else launch.steps
    of_ranks = asdict(options) | {"save": saves_directory(options), "sample_prompt": tuple(launch.sample_prompt or ())}
    sets = named_files(launch.validation_data or [])
    job = Job(named(model, launch.peft), str(spec), data, steps, mixture, validation_data=sets, **of_ranks)
    if launch.epochs is None:
        return job
    if launch.steps is not None or not 0 < launch.epochs <= MOST_EPOCHS:
        what = f"--epochs {launch.epochs:g}: needs a number above 0, and excludes --steps"
        raise PlanError(what, where="--epochs", fix="write --epochs 3, or --steps 1000")
    return replace(job, num_steps=steps_of(job, launch.epochs))


@takes(LaunchOptions, TrainOptions)
def train_command(
    context: typer.Context, model: Model, spec: SpecFile, launch: LaunchOptions, options: TrainOptions
) -> None:
    """Train a model on text. Starts its local processes itself, or runs as a rank of torchrun."""
    from runtime.training.run import largest_difference, train

    if launch.secret_file is not None:
        from runtime.distributed.faults.board import SECRET, secret_in

        os.environ[SECRET] = secret_in(launch.secret_file)  # for every rank that is started here
    job = job_of(model, spec, launch, options)
    shown = show_plan if launch.show_plan else None
    trained = train(job, launch.nproc, shown, launch.max_restarts, is_command=context.obj == PROCESS)
    if job.compare and (rows := trained.rows):
        write_text(f"largest difference from one process over {len(rows)} steps: {largest_difference(rows):.2e}")
    if trained.failure is not None:
        typer.echo(f"Error: {trained.failure}", err=True)
        raise typer.Exit(CHECK_FAILED)
    if trained.stopped is not None:
        write_text(f"stopped by {signal.Signals(trained.stopped).name}")
    if trained.stopped == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)
