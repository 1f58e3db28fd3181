"""The options of ``meshwright train``, by topic; ``job`` combines them for the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from passes.errors import PlanError
from planner.cli import Peft

if TYPE_CHECKING:
    from runtime.training.job import Job

Text = str | None
File = Path | None
Number = int | None
MOST_SECONDS = 7 * 24 * 3600  # --timeout
MOST_EPOCHS = 1e6
DEFAULT_STEPS = 100


@dataclass(frozen=True)
class Reading:
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|stdlib|FILE.py:FUNCTION",
            help="Token file, text file or directory, stdlib (Python's own source), or a function of (rank, size) that "
            "gives a stream. Repeat as PATH=SHARE for a mixture. Default: data.mixture of the spec.",
        ),
    ] = None
    tokenizer: Annotated[
        Text, typer.Option(metavar="FILE", help="A tokenizer.json for text; default: bytes are the tokens.")
    ] = None


@dataclass(frozen=True)
class Running:
    steps: Annotated[Number, typer.Option(min=1, help="Number of updates; default: 100.")] = None
    epochs: Annotated[
        float | None, typer.Option(metavar="E", help="In place of --steps: how often each sample of the data comes.")
    ] = None
    nproc: Annotated[Number, typer.Option(help="Number of local processes; default: the size of the mesh.")] = None
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restart after a failure of a rank, at most N times.")
    ] = 0
    timeout: Annotated[
        float,
        typer.Option(min=1, max=MOST_SECONDS, metavar="SECONDS", help="Timeout for communication between ranks."),
    ] = 600.0
    secret_file: Annotated[
        File,
        typer.Option(
            metavar="FILE", help="File with a secret that all hosts share; it signs the entries of ranks in the store."
        ),
    ] = None
    peft: Peft = None
    plan: Annotated[
        File,
        typer.Option(metavar="FILE.pt", help="Run this saved plan of MODEL and SPEC: ranks neither capture nor plan."),
    ] = None
    show_plan: Annotated[bool, typer.Option("--show-plan", help="Print the plan first.")] = False


@dataclass(frozen=True)
class Checking:
    compare: Annotated[bool, typer.Option("--compare", help="Also train in one process, and print both losses.")] = (
        False
    )
    audit: Annotated[
        Number,
        typer.Option(min=1, metavar="N", help="Every N steps, compare one microbatch with the model in eager mode."),
    ] = None
    validate_every: Annotated[
        Number,
        typer.Option(
            min=1, metavar="N", help="Compute the validation loss every N updates (data.validation of the spec)."
        ),
    ] = None

    validation_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Text or token file to validate on; give it several times. The first decides --keep-best, --patience.",
        ),
    ] = None
    metric: Annotated[
        Text,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="At each validation, figures of yours: function(log_probs, labels, batch) returns {name: (sum, "
            "count)}.",
        ),
    ] = None
    patience: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Stop after N validations without a lower loss.")
    ] = None


@dataclass(frozen=True)
class Showing:
    log: Annotated[
        File,
        typer.Option(
            "--log",
            "--log-file",
            metavar="FILE.jsonl",
            help="Write a JSON row per step to this file. Under torchrun: --log-file.",
        ),
    ] = None
    tensorboard: Annotated[
        File, typer.Option(metavar="DIR", help="Write TensorBoard events to this directory (extra tensorboard).")
    ] = None
    wandb: Annotated[
        Text, typer.Option(metavar="PROJECT", help="Log to this Weights & Biases project (pip install wandb).")
    ] = None
    callback: Annotated[
        Text,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Call this function on rank 0 with the row of each step, and the run: run.stop(), set_lr(x), save(), "
            "log(name, value).",
        ),
    ] = None
    plot: Annotated[
        File, typer.Option(metavar="FILE.png|svg", help="At the end, plot the loss to this file (extra plot).")
    ] = None
    profile: Annotated[
        Text, typer.Option(metavar="STEPS", help="Profile 3 steps after the first (3), or steps 10 to 13 (10:13).")
    ] = None
    profile_to: Annotated[File, typer.Option(metavar="FILE.json", help="File for the trace; default: trace.json.")] = (
        None
    )
    sample_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Every N steps, continue the texts of --sample-prompt.")
    ] = None
    sample_prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to continue; give it several times.")
    ] = None
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no line per step, only errors; files are written.")
    ] = False


@dataclass(frozen=True)
class Saving:
    save: Annotated[
        Text, typer.Option(metavar="DIR", help="Directory for saves of the training state; at least one at the end.")
    ] = None
    save_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Save every N updates; default directory: checkpoints/.")
    ] = None
    save_adapters: Annotated[
        Text, typer.Option(metavar="DIR", help="At the end, write the adapters of --peft to this directory.")
    ] = None
    save_merged: Annotated[
        Text, typer.Option(metavar="DIR", help="At the end, write the base with the adapters merged, for transformers.")
    ] = None
    keep: Annotated[Number, typer.Option(min=1, metavar="K", help="Keep only the K newest saves; default: all.")] = None
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep the save with the lowest validation loss in DIR/best.")
    ] = False
    resume: Annotated[
        Text,
        typer.Option(metavar="auto|DIR", help="Resume from a save; auto: the newest intact one in --save, if any."),
    ] = None


def job_of(model: str, spec: Path, running: Running, *groups: Reading | Checking | Showing | Saving) -> Job:
    """The job of the ranks. An option has the name of its field in the job."""
    from planner.capture.model.with_adapters import named
    from runtime.training.data import steps_of
    from runtime.training.job import Job, saves_directory
    from runtime.training.mixture import mixture_of_spec, named_files, read_mixture

    given: dict[str, Any] = {
        name: str(v) if isinstance(v, Path) else v for group in groups for name, v in asdict(group).items()
    }
    given["save"] = saves_directory(given["save"], given["save_every"], given["resume"], given["keep_best"])
    given["sample_prompt"] = tuple(given.get("sample_prompt") or ())
    given["validation_data"] = named_files(given.get("validation_data") or [])
    texts = given["data"]
    given["data"], given["mixture"] = read_mixture(texts) if texts else mixture_of_spec(str(spec))
    plan = None if running.plan is None else str(running.plan)
    steps = DEFAULT_STEPS if running.steps is None else running.steps
    job = Job(named(model, running.peft), str(spec), num_steps=steps, timeout=running.timeout, plan=plan, **given)
    if running.epochs is None:
        return job
    if running.steps is not None or not 0 < running.epochs <= MOST_EPOCHS:
        what = f"--epochs {running.epochs:g}: give a number above 0, and no --steps beside it"
        raise PlanError(what, where="--epochs", fix="write --epochs 3, or --steps 1000")
    return replace(job, num_steps=steps_of(job, running.epochs))
