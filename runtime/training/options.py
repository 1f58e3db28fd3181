"""The options of a training run, each described once: for the command line, for the ranks, and as they are compared.

OF_ONE_RANK     of one rank alone, or compared by content: the plan with its spec, the data
PLACE           a file or directory, which hosts may name in different ways: ranks compare whether one is given
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
    """Options of ``meshwright train`` that its ranks read. Ranks of a launcher compare them."""

    tokenizer: Text = option("A tokenizer.json for text; default: bytes are the tokens.", "FILE", mark=OF_ONE_RANK)
    timeout: float = option(
        "Timeout for communication between ranks.", "SECONDS", default=600.0, min=1, max=MOST_SECONDS, mark=OF_ONE_RANK
    )
    plan: Text = option("Run this saved plan of MODEL and SPEC: ranks neither capture nor plan.", "FILE.pt", mark=PLACE)

    compare: bool = flag("Also train in one process, and print both losses.", mark=OF_ONE_RANK)
    audit: Number = option("Every N steps, compare one microbatch with the model in eager mode.", "N", min=1)
    validate_every: Number = option(
        "Compute the validation loss every N updates (data.validation of the spec).", "N", min=1
    )
    metric: Text = option(
        "At each validation, figures of yours: function(log_probs, labels, batch) returns {name: (sum, count)}; with "
        ":texts, function(prompts, texts, rows).",
        "FILE.py:FUNCTION[:texts]",
    )
    prompts: Text = option("Rows with a field prompt, which the model continues for --metric …:texts.", "FILE")
    patience: Number = option("Stop after N validations without a lower loss.", "N", min=1)

    log: Text = option(
        "Write a JSON row per step to this file. Under torchrun: --log-file.",
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
        "Call this function on rank 0 with the row of each step, and the run: run.stop(), set_lr(x), save(), "
        "log(name, value).",
        "FILE.py:FUNCTION",
        mark=OF_ONE_RANK,
    )
    plot: Text = option("At the end, plot the loss to this file (extra plot).", "FILE.png|svg", mark=OF_ONE_RANK)
    profile: Text = option("Profile 3 steps after the first (3), or steps 10 to 13 (10:13).", "STEPS")
    profile_to: Text = option("File for the trace; default: trace.json.", "FILE.json", mark=OF_ONE_RANK)
    sample_every: Number = option("Every N steps, continue the texts of --sample-prompt.", "N", min=1)
    quiet: bool = flag("Print no line per step, only errors; files are written.", "-q", mark=OF_ONE_RANK)

    save: Text = option("Directory for saves of the training state; at least one at the end.", "DIR", mark=PLACE)
    save_every: Number = option("Save every N updates; default directory: checkpoints/.", "N", min=1)
    save_adapters: Text = option("At the end, write the adapters of --peft to this directory.", "DIR", mark=PLACE)
    save_merged: Text = option(
        "At the end, write the base with the adapters merged, for transformers.", "DIR", mark=PLACE
    )
    keep: Number = option("Keep only the K newest saves; default: all.", "K", min=1, mark=OF_ONE_RANK)
    keep_best: bool = flag("Keep the save with the lowest validation loss, and its adapters.")
    resume: Text = option("Resume from a save; auto: the newest intact one in --save, if any.", "auto|DIR", mark=PLACE)


def saves_directory(asked: TrainOptions) -> str | None:
    """The directory of saves: ``save``, or ``checkpoints`` if an option asks for saves without a directory."""
    asks = asked.save_every is not None or asked.resume == AUTO or asked.keep_best
    return asked.save or (DEFAULT_SAVES if asks else None)
