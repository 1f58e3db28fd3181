"""The command ``calibrate``: measure this machine and write a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli import write_text
from planner.files.text import check_file

EPILOG = "Example: meshwright calibrate -o this-machine.yaml --nproc 4"


def calibrate_command(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="CLUSTER.yaml", help="Write to this file instead of stdout."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks that measure at the same time; default: the number of GPUs, or of CPU cores."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Approximate duration of the measurement.")] = 12.0,
) -> None:
    """Measure the devices and links of this machine, and write a cluster file.

    Products, attention, memory and collectives, on local processes that it starts itself, all at the same time.
    """
    from runtime.calibrate.run import calibrate

    if output is not None:
        check_file(output, "--output")
    name = "" if output is None else output.name.partition(".")[0]
    write_text(calibrate(nproc, seconds, name or "this-machine"), output)
