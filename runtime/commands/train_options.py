"""The options of ``meshwright train``, by what they are about; ``job`` puts them together for the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import NoCache

if TYPE_CHECKING:
    from runtime.training.job import Job

Text = str | None
File = Path | None
Number = int | None
MOST_SECONDS = 7 * 24 * 3600  # --timeout


@dataclass(frozen=True)
class Reading:
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|stdlib",
            help="A token file, or a text file or directory; stdlib: Python's own source. PATH=SHARE, several times: "
            "a mixture. If not given, the spec's data.mixture.",
        ),
    ] = None
    tokenizer: Annotated[
        Text, typer.Option(metavar="FILE", help="A tokenizer.json that cuts a text; if not given, its bytes.")
    ] = None


@dataclass(frozen=True)
class Running:
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 100
    nproc: Annotated[Number, typer.Option(help="Local processes to start; the mesh's size if not given.")] = None
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start the ranks again, at most N times, when one fails.")
    ] = 0
    timeout: Annotated[
        float,
        typer.Option(min=1, max=MOST_SECONDS, metavar="SECONDS", help="How long a rank waits for the others."),
    ] = 600.0
    secret_file: Annotated[
        File, typer.Option(metavar="FILE", help="A secret that all hosts share, to sign what ranks write in the store.")
    ] = None
    no_cache: NoCache = False
    show_plan: Annotated[bool, typer.Option("--show-plan", help="Print the plan first.")] = False


@dataclass(frozen=True)
class Checking:
    compare: Annotated[bool, typer.Option("--compare", help="Train in one process beside, and print both losses.")] = (
        False
    )
    audit: Annotated[
        Number,
        typer.Option(
            min=1, metavar="N", help="Each N steps, compare one microbatch with the model itself in eager mode."
        ),
    ] = None
    validate_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Each N updates, the loss of what the spec holds out.")
    ] = None

    patience: Annotated[
        Number, typer.Option(min=1, metavar="N", help="End after N validations without a smaller loss.")
    ] = None


@dataclass(frozen=True)
class Showing:
    log: Annotated[
        File,
        typer.Option(
            "--log",
            "--log-file",
            metavar="FILE.jsonl",
            help="Write every step here as JSON. Under torchrun: --log-file.",
        ),
    ] = None
    tensorboard: Annotated[
        File, typer.Option(metavar="DIR", help="Write every step here for TensorBoard (extra tensorboard).")
    ] = None
    wandb: Annotated[
        Text, typer.Option(metavar="PROJECT", help="Log every step to this project of Weights & Biases (pip wandb).")
    ] = None
    callback: Annotated[
        Text, typer.Option(metavar="FILE.py:FUNCTION", help="Call it on rank 0 with the row of each step.")
    ] = None
    plot: Annotated[File, typer.Option(metavar="FILE.png|svg", help="At the end, draw the loss here (extra plot).")] = (
        None
    )
    profile: Annotated[
        Text, typer.Option(metavar="STEPS", help="Trace 3 steps after the first (3), or steps 10 to 13 (10:13).")
    ] = None
    profile_to: Annotated[
        File, typer.Option(metavar="FILE.json", help="Where the trace goes; trace.json if not given.")
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for a step: files and errors alone.")] = False


@dataclass(frozen=True)
class Saving:
    save: Annotated[
        Text, typer.Option(metavar="DIR", help="Save the state of the training here, at the end at least.")
    ] = None
    save_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Save after every N updates; to checkpoints/ if no --save.")
    ] = None
    keep: Annotated[
        Number, typer.Option(min=1, metavar="K", help="Let only the K newest saves stay; all if not given.")
    ] = None
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep the save with the least validation loss in DIR/best.")
    ] = False
    resume: Annotated[
        Text, typer.Option(metavar="auto|DIR", help="Go on from a save; auto: the newest good one of --save, if any.")
    ] = None


def job_of(model: str, spec: Path, running: Running, *groups: Reading | Checking | Showing | Saving) -> Job:
    """What the ranks are asked for. An option has the name of its field in the job."""
    from runtime.training.job import Job, saves_directory
    from runtime.training.mixture import mixture_of_spec, read_mixture

    given: dict[str, Any] = {
        name: str(v) if isinstance(v, Path) else v for group in groups for name, v in asdict(group).items()
    }
    given["save"] = saves_directory(given["save"], given["save_every"], given["resume"], given["keep_best"])
    texts = given["data"]
    given["data"], given["mixture"] = read_mixture(texts) if texts else mixture_of_spec(str(spec))
    return Job(model, str(spec), num_steps=running.steps, timeout=running.timeout, **given)
