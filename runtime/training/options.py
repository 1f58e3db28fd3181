"""The options of a training run, each described once: for the command line, the ranks, and their comparison over ranks.

OF_ONE_RANK     not compared between ranks: read by one rank only, or compared by content (the spec, the data)
PLACE           a file or directory with paths that may differ between hosts: ranks compare only whether it is set
"""

from dataclasses import dataclass

from runtime.options import flag, option

AUTO = "auto"
DEFAULT_SAVES = "checkpoints"
OF_ONE_RANK, PLACE = "of one rank", "place"
MOST_SECONDS = 7 * 24 * 3600  # --timeout
Text = str | None
Number = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of ``meshwright train`` that its ranks read, and compare with each other under a launcher."""

    tokenizer: Text = option("A tokenizer.json for text; default: bytes are the tokens.", "FILE", mark=OF_ONE_RANK)
    timeout: float = option(
        "Timeout for communication between ranks.", "SECONDS", default=600.0, min=1, max=MOST_SECONDS, mark=OF_ONE_RANK
    )
    plan: Text = option(
        "Run this saved plan of MODEL and SPEC, without capturing or planning again.", "FILE.pt", mark=PLACE
    )

    compare: bool = flag("Also train in one process, and print both losses.", mark=OF_ONE_RANK)
    audit: Number = option("Every N steps, compare the loss of one microbatch with MODEL in eager mode.", "N", min=1)
    validate_every: Number = option(
        "Compute the validation loss every N updates (data.validation of the spec).", "N", min=1
    )
    metric: Text = option(
        "Your own metrics at each validation: function(log_probs, labels, batch) returns {name: (sum, count)}; with "
        ":texts, function(prompts, texts, rows).",
        "FILE.py:FUNCTION[:texts]",
    )
    prompts: Text = option("JSON lines with a field prompt, which the model continues for --metric …:texts.", "FILE")
    patience: Number = option("Stop after N validations without a lower loss.", "N", min=1)

    log: Text = option(
        "Write a JSON row per step to this file. Under torchrun: --log-file.",  # --log is ambiguous to torchrun
        "FILE.jsonl",
        "--log",
        "--log-file",
        mark=OF_ONE_RANK,
    )
    tensorboard: Text = option(
        "Write TensorBoard events to this directory (extra tensorboard).", "DIR", mark=OF_ONE_RANK
    )
    wandb: Text = option(
        "Log to this Weights & Biases project (pip install wandb).", "PROJECT[/NAME]", mark=OF_ONE_RANK
    )
    callback: Text = option(
        "After each step, call this function on rank 0 with the row of the step and, if it takes two arguments, the "
        "run: run.stop(), set_lr(x), save(), log(name, value).",
        "FILE.py:FUNCTION",
        mark=OF_ONE_RANK,
    )
    plot: Text = option("At the end, plot the loss to this file (extra plot).", "FILE.png|svg", mark=OF_ONE_RANK)
    profile: Text = option("Steps to profile: 3 for three steps after the first, 10:13 for steps 10 to 13.", "STEPS")
    profile_to: Text = option("File for the trace; default: trace.json.", "FILE.json", mark=OF_ONE_RANK)
    sample_every: Number = option("Every N steps, continue the texts of --sample-prompt.", "N", min=1)
    quiet: bool = flag("Do not print a line per step. Logs and other files are still written.", "-q", mark=OF_ONE_RANK)

    save: Text = option("Save the training state to this directory, at least at the end.", "DIR", mark=PLACE)
    save_every: Number = option("Save every N updates; default directory: checkpoints/.", "N", min=1)
    save_adapters: Text = option("At the end, write the adapters of --peft to this directory.", "DIR", mark=PLACE)
    save_merged: Text = option(
        "At the end, write the base model with the adapters merged to this directory, for transformers.",
        "DIR",
        mark=PLACE,
    )
    keep: Number = option("Keep only the K newest saves; default: all.", "K", min=1, mark=OF_ONE_RANK)
    keep_best: bool = flag("Also keep the save with the lowest validation loss, and its adapters.")
    resume: Text = option(
        "Resume from this save; auto: from the newest intact save in --save, if any.", "auto|DIR", mark=PLACE
    )


def saves_directory(options: TrainOptions) -> str | None:
    """Return the directory of saves: ``save``, or ``checkpoints`` if only another option requires saves."""
    asks = options.save_every is not None or options.resume == AUTO or options.keep_best
    return options.save or (DEFAULT_SAVES if asks else None)
