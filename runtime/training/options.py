"""The options of a training run, each described once: for the command line, for the ranks, and as they are compared.

OF_ONE_RANK     of one rank alone, or compared by content: the plan with its spec, the data
PLACE           a file or directory, which hosts may name in different ways: ranks compare whether one is given
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

AUTO = "auto"
DEFAULT_SAVES = "checkpoints"
OF_ONE_RANK, PLACE = "of one rank", "place"
MOST_SECONDS = 7 * 24 * 3600  # --timeout
Text = str | None
Number = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of ``meshwright train`` that its ranks read. Ranks of a launcher compare them."""

    tokenizer: Annotated[
        Text,
        typer.Option(metavar="FILE", help="A tokenizer.json for text; default: bytes are the tokens."),
        OF_ONE_RANK,
    ] = None
    timeout: Annotated[
        float,
        typer.Option(min=1, max=MOST_SECONDS, metavar="SECONDS", help="Timeout for communication between ranks."),
        OF_ONE_RANK,
    ] = 600.0
    plan: Annotated[
        Text,
        typer.Option(metavar="FILE.pt", help="Run this saved plan of MODEL and SPEC: ranks neither capture nor plan."),
        PLACE,
    ] = None

    compare: Annotated[
        bool, typer.Option("--compare", help="Also train in one process, and print both losses."), OF_ONE_RANK
    ] = False
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
    metric: Annotated[
        Text,
        typer.Option(
            metavar="FILE.py:FUNCTION[:texts]",
            help="At each validation, figures of yours: function(log_probs, labels, batch) returns {name: (sum, "
            "count)}; with :texts, function(prompts, texts, rows).",
        ),
    ] = None
    prompts: Annotated[
        Text,
        typer.Option(metavar="FILE", help="Rows with a field prompt, which the model continues for --metric …:texts."),
    ] = None
    patience: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Stop after N validations without a lower loss.")
    ] = None

    log: Annotated[
        Text,
        typer.Option(
            "--log",
            "--log-file",
            metavar="FILE.jsonl",
            help="Write a JSON row per step to this file. Under torchrun: --log-file.",
        ),
        OF_ONE_RANK,
    ] = None
    tensorboard: Annotated[
        Text,
        typer.Option(metavar="DIR", help="Write TensorBoard events to this directory (extra tensorboard)."),
        OF_ONE_RANK,
    ] = None
    wandb: Annotated[
        Text,
        typer.Option(metavar="PROJECT[/NAME]", help="Log to this Weights & Biases project (pip install wandb)."),
        OF_ONE_RANK,
    ] = None
    callback: Annotated[
        Text,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Call this function on rank 0 with the row of each step, and the run: run.stop(), set_lr(x), save(), "
            "log(name, value).",
        ),
        OF_ONE_RANK,
    ] = None
    plot: Annotated[
        Text,
        typer.Option(metavar="FILE.png|svg", help="At the end, plot the loss to this file (extra plot)."),
        OF_ONE_RANK,
    ] = None
    profile: Annotated[
        Text, typer.Option(metavar="STEPS", help="Profile 3 steps after the first (3), or steps 10 to 13 (10:13).")
    ] = None
    profile_to: Annotated[
        Text, typer.Option(metavar="FILE.json", help="File for the trace; default: trace.json."), OF_ONE_RANK
    ] = None
    sample_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Every N steps, continue the texts of --sample-prompt.")
    ] = None
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print no line per step, only errors; files are written."),
        OF_ONE_RANK,
    ] = False

    save: Annotated[
        Text,
        typer.Option(metavar="DIR", help="Directory for saves of the training state; at least one at the end."),
        PLACE,
    ] = None
    save_every: Annotated[
        Number, typer.Option(min=1, metavar="N", help="Save every N updates; default directory: checkpoints/.")
    ] = None
    save_adapters: Annotated[
        Text, typer.Option(metavar="DIR", help="At the end, write the adapters of --peft to this directory."), PLACE
    ] = None
    save_merged: Annotated[
        Text,
        typer.Option(metavar="DIR", help="At the end, write the base with the adapters merged, for transformers."),
        PLACE,
    ] = None
    keep: Annotated[
        Number, typer.Option(min=1, metavar="K", help="Keep only the K newest saves; default: all."), OF_ONE_RANK
    ] = None
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="Keep the save with the lowest validation loss, and its adapters.")
    ] = False
    resume: Annotated[
        Text,
        typer.Option(metavar="auto|DIR", help="Resume from a save; auto: the newest intact one in --save, if any."),
        PLACE,
    ] = None


def saves_directory(asked: TrainOptions) -> str | None:
    """The directory of saves: ``save``, or ``checkpoints`` if an option asks for saves without a directory."""
    asks = asked.save_every is not None or asked.resume == AUTO or asked.keep_best
    return asked.save or (DEFAULT_SAVES if asks else None)
