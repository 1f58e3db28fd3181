"""The command ``meshwright``: the planner's commands, and those that run a plan: ``verify`` and ``train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import Model, SpecFile, app, show_plan, write_text

CHECK_FAILED = 1


@app.command("verify", epilog="Example: meshwright verify examples/gpt.py:build examples/gpt.yaml")
def verify_command(
    model: Model,
    spec: SpecFile,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates to compare.")] = 1,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative, for loss and gradients; by the model's precision if not given.")
    ] = None,
    remove_collective: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Leave out the N-th collective, to see the check turn red.")
    ] = None,
) -> None:
    """Run the plan and one process side by side; compare loss, every gradient and one update. Exit 1 if they differ.

    Starts the local processes itself.
    """
    from runtime.verify.run import verify

    report = verify(model, str(spec), steps=steps, remove_collective=remove_collective, tolerance=tolerance)
    write_text(str(report))
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)


@app.command(
    "train",
    epilog="Examples: meshwright train examples/gpt.py:build examples/gpt.yaml --data stdlib --steps 30 --nproc 4 "
    "· torchrun --nnodes 2 --nproc-per-node 8 … -m runtime.cli train MODEL SPEC --data text.txt",
)
def train_command(
    model: Model,
    spec: SpecFile,
    data: Annotated[
        str,
        typer.Option(metavar="PATH|stdlib", help="A file or directory, read as bytes; stdlib: Python's own source."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 100,
    nproc: Annotated[int | None, typer.Option(help="Local processes to start; the mesh's size if not given.")] = None,
    compare: Annotated[bool, typer.Option(help="Train in one process beside, and print both losses.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", "--log-file", metavar="FILE.jsonl", help="Write every step here as JSON.")
    ] = None,
    with_plan: Annotated[bool, typer.Option("--show-plan", help="Print the plan first.")] = False,
) -> None:
    """Train on the bytes of a text. Starts the local processes itself; under torchrun it is one of them."""
    from runtime.train import Job, largest_difference, train

    job = Job(model, str(spec), data, steps, compare, str(log) if log else None)
    rows = train(job, nproc, show_plan if with_plan else None)
    if compare and rows:
        write_text(f"largest difference to one process over {len(rows)} steps: {largest_difference(rows):.2e}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
