"""The command ``meshwright train``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from planner.cli import Model, SpecFile, show_plan, write_text

CHECK_FAILED = 1
INTERRUPTED = 130
EPILOG = (
    "Examples: meshwright train examples/gpt.py:build examples/gpt.yaml --data stdlib --steps 30 --nproc 4 "
    "· torchrun --nnodes 2 --nproc-per-node 8 … -m runtime.cli train MODEL SPEC --data text.txt"
)


def train_command(
    model: Model,
    spec: SpecFile,
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH|stdlib", help="A token file, or a text file or directory; stdlib: Python's own source."
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="A tokenizer.json that cuts a text; if not given, its bytes.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 100,
    nproc: Annotated[int | None, typer.Option(help="Local processes to start; the mesh's size if not given.")] = None,
    compare: Annotated[bool, typer.Option(help="Train in one process beside, and print both losses.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", "--log-file", metavar="FILE.jsonl", help="Write every step here as JSON.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every step here for TensorBoard (extra tensorboard).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="At the end, draw the loss here (extra plot).")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Trace 3 steps after the first (3), or steps 10 to 13 (10:13).")
    ] = None,
    profile_to: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Where the trace goes; trace.json if not given.")
    ] = None,
    validate_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Each N updates, the loss of what the spec holds out."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for a step: files and errors alone.")] = False,
    with_plan: Annotated[bool, typer.Option("--show-plan", help="Print the plan first.")] = False,
    save: Annotated[
        str | None, typer.Option(metavar="DIR", help="Save the state of the training here, at the end at least.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Save after every N updates; to checkpoints/ if no --save.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Let only the K newest saves stay; all if not given.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|DIR", help="Go on from a save; auto: the newest good one of --save, if any."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start the ranks again, at most N times, when one fails.")
    ] = 0,
) -> None:
    """Train on a text. Starts the local processes itself; under torchrun it is one of them."""
    from runtime.train import largest_difference, train
    from runtime.training.job import Job, saves_directory

    saves = saves_directory(save, save_every, resume)
    job = Job(
        model,
        str(spec),
        data,
        steps,
        compare,
        log=_text(log),
        save=saves,
        save_every=save_every,
        keep=keep,
        resume=resume,
        plot=_text(plot),
        tensorboard=_text(tensorboard),
        profile=profile,
        profile_to=_text(profile_to),
        tokenizer=tokenizer,
        validate_every=validate_every,
        quiet=quiet,
    )
    trained = train(job, nproc, show_plan if with_plan else None, max_restarts)
    rows = trained.rows
    if compare and rows:
        write_text(f"largest difference to one process over {len(rows)} steps: {largest_difference(rows):.2e}")
    if trained.failure is not None:
        typer.echo(f"Error: {trained.failure}", err=True)
        raise typer.Exit(CHECK_FAILED)
    if trained.stopped is not None:
        write_text(f"stopped by {signal.Signals(trained.stopped).name}")
    if trained.stopped == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
