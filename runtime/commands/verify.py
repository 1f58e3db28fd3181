"""The command ``meshwright verify``: compares training by a plan with one process."""

from dataclasses import dataclass

import typer

from planner.commands.cli import Model, Output, Peft, SpecFile, write_text
from runtime.options import option, takes

EPILOG = "Example: meshwright verify examples/gpt.py:build examples/gpt.yaml"
CHECK_FAILED = 1


@dataclass(frozen=True)
class Options:
    steps: int = option("Number of updates to run and compare.", default=1, min=1)
    tolerance: float | None = option("Relative tolerance of loss and gradients; default: by the model's precision.")
    remove_collective: int | None = option("Remove collective N, to see the comparison fail.", "N", min=0)
    output: Output = None
    peft: Peft = None


@takes(Options)
def verify_command(model: Model, spec: SpecFile, options: Options) -> None:
    """Train with the plan and in one process, and compare losses, gradients and parameters. Exit 1 if they differ.

    Starts the local processes itself.
    """
    from planner.capture.model.reference import named
    from runtime.verify.run import verify

    how = {"steps": options.steps, "remove_collective": options.remove_collective, "tolerance": options.tolerance}
    report = verify(named(model, options.peft), str(spec), **how)
    write_text(str(report), options.output)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)
