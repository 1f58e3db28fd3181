"""The command ``meshwright train``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.cli import Model, SpecFile, show_plan, write_text
from planner.command_group import PROCESS
from runtime.commands.options import takes
from runtime.commands.train_options import Checking, Reading, Running, Saving, Showing, job_of

if TYPE_CHECKING:
    from runtime.training.job import Trained

CHECK_FAILED = 1
INTERRUPTED = 130
EPILOG = (
    "Examples: meshwright train examples/gpt.py:build examples/gpt.yaml --data stdlib --steps 30 --nproc 4 "
    "· torchrun --nnodes 2 --nproc-per-node 8 … -m runtime.cli train MODEL SPEC --data text.txt"
)


@takes(Reading, Running, Checking, Showing, Saving)
def train_command(
    context: typer.Context,
    model: Model,
    spec: SpecFile,
    reading: Reading,
    running: Running,
    checking: Checking,
    showing: Showing,
    saving: Saving,
) -> None:
    """Train a model on text. Starts its local processes itself, or runs as a rank of torchrun."""
    from runtime.train import largest_difference, train

    if running.secret_file is not None:
        _take_secret(running.secret_file)
    job = job_of(model, spec, running, reading, checking, showing, saving)
    shown = show_plan if running.show_plan else None
    trained = train(job, running.nproc, shown, running.max_restarts, is_command=context.obj == PROCESS)
    if job.compare and (rows := trained.rows):
        write_text(f"largest difference from one process over {len(rows)} steps: {largest_difference(rows):.2e}")
    _end(trained)


def _take_secret(file: Path) -> None:
    """Put the secret in the environment, for every rank that is started here."""
    from runtime.distributed.signatures import SECRET, secret_in

    os.environ[SECRET] = secret_in(file)


def _end(trained: Trained) -> None:
    """Say why the run ended before its last step, and exit by it."""
    if trained.failure is not None:
        typer.echo(f"Error: {trained.failure}", err=True)
        raise typer.Exit(CHECK_FAILED)
    if trained.stopped is not None:
        write_text(f"stopped by {signal.Signals(trained.stopped).name}")
    if trained.stopped == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)
