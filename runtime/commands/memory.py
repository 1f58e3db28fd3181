"""The command ``meshwright memory``: compares predicted and measured memory of each rank."""

import json
from dataclasses import dataclass

import typer

from planner.commands.cli import Format, Model, Output, Peft, SpecFile, write_text
from runtime.options import flag, option, takes

EPILOG = "Example: meshwright memory examples/gpt.py:build examples/gpt.yaml"
CHECK_FAILED = 1


@dataclass(frozen=True)
class Options:
    evaluate: bool = flag("Run an evaluation instead of a training step: no gradients, no optimizer state.")
    format: Format = option("Output format.", default="table")
    output: Output = None
    peft: Peft = None


@takes(Options)
def memory_command(model: Model, spec: SpecFile, options: Options) -> None:
    """Run a step and compare predicted with measured memory of each rank. Exit 1 if they differ by more than 1 % in
    parameters, gradients and optimizer state, or 3 % in activations.

    Starts the local processes itself.
    """
    from planner.capture.model.reference import named
    from runtime.profiling.memory import compare_memory

    report = compare_memory(named(model, options.peft), str(spec), evaluates=options.evaluate)
    write_text(json.dumps(report.to_dict(), indent=2) if options.format == "json" else str(report), options.output)
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)
