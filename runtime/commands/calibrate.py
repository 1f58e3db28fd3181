"""The command ``calibrate``: measure this machine and write a cluster file."""

from dataclasses import dataclass
from pathlib import Path

from planner.commands.cli import write_text
from planner.files.text import check_file
from runtime.options import option, takes

EPILOG = "Example: meshwright calibrate -o this-machine.yaml --nproc 4"


@dataclass(frozen=True)
class Options:
    output: Path | None = option("Write to this file instead of stdout.", "CLUSTER.yaml", "-o", "--output")
    nproc: int | None = option(
        "Number of ranks that run at the same time; default: the number of GPUs, or of CPU cores without a GPU."
    )
    seconds: float = option("Approximate duration of the measurement.", default=12.0)


@takes(Options)
def calibrate_command(options: Options) -> None:
    """Measure the devices and links of this machine, and write a cluster file.

    Starts the local processes itself. All ranks time matrix products, attention, copies and collectives at once.
    """
    from runtime.calibrate.run import calibrate

    if (output := options.output) is not None:
        check_file(output, "--output")
    name = "" if output is None else output.name.partition(".")[0]
    write_text(calibrate(options.nproc, options.seconds, name or "this-machine"), output)
