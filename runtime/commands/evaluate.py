"""The command ``meshwright evaluate``: perplexity or cloze accuracy of a model on a text."""

import json
from dataclasses import MISSING, dataclass

from passes.errors import PlanError
from planner.cli import Format, Model, Output, Peft, SpecFile, show_table, write_text
from runtime.options import Load, NumRanks, Tokenizer, flag, option, takes

EPILOG = (
    "Examples: meshwright evaluate examples/gpt.py:build examples/gpt.yaml --data book.txt --load checkpoints "
    "· meshwright evaluate hf:gpt2/ spec.yaml --data passages.tokens --cloze --format json"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    data: str = option(
        "Token file, text file or directory, or stdlib (Python's own source).", "PATH|stdlib", default=MISSING
    )
    perplexity: bool = flag("Perplexity over sliding windows (the default).")
    cloze: bool = flag("Cloze accuracy: predict all tokens of the last word of each document.")
    tokenizer: Tokenizer = None
    load: Load = None
    ema: bool = flag("With --load: evaluate the running mean of the weights (optimizer.ema).")
    stride: int | None = option(
        "Tokens between the starts of windows; default: 32, or less for short windows.", "N", min=1
    )
    original_tokens: int | None = option(
        "Number of tokens that normalizes perplexity; default: the number of words.", "N", min=1
    )
    nproc: NumRanks = None
    format: Format = option("Output format.", default="table")
    output: Output = None
    peft: Peft = None


@takes(Options)
def evaluate_command(model: Model, spec: SpecFile, asked: Options) -> None:
    """Evaluate a language model on held-out text: perplexity or cloze accuracy. Works with every layout.

    Starts its local processes itself, or runs as a rank of torchrun.
    """
    from planner.capture.model.reference import named
    from runtime.evaluation.run import Evaluation, Weights, evaluate

    _check_options(asked)
    weights = Weights(named(model, asked.peft), asked.load, asked.ema)
    how = {"is_cloze": asked.cloze, "stride": asked.stride, "original_tokens": asked.original_tokens}
    found = evaluate(Evaluation(weights, str(spec), asked.data, tokenizer=asked.tokenizer, **how), asked.nproc)
    if found is None:
        return
    if asked.format == "json":
        write_text(json.dumps({"data": asked.data, **found.to_dict()}, indent=2), asked.output)
    else:
        title = f"{'Cloze accuracy' if asked.cloze else 'Perplexity'} on {asked.data}"
        show_table(title, ("figure", "value"), found.rows(), asked.output)


def _check_options(asked: Options) -> None:
    """Raise PlanError for options that exclude each other."""
    if asked.perplexity and asked.cloze:
        raise PlanError("--perplexity and --cloze cannot be combined", where="--cloze", fix="remove one of them")
    for name, value in (("--stride", asked.stride), ("--original-tokens", asked.original_tokens)):
        if value is not None and asked.cloze:
            raise PlanError(f"{name} applies to perplexity only", where=name, fix=f"remove {name} or --cloze")
