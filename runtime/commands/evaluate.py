"""The command ``meshwright evaluate``: perplexity or cloze accuracy of a model on a text."""

import json
from dataclasses import MISSING, dataclass

from passes.errors import PlanError
from planner.commands.cli import Format, Model, Output, Peft, SpecFile, show_table, write_text
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
def evaluate_command(model: Model, spec: SpecFile, options: Options) -> None:
    """Evaluate a language model on held-out text: perplexity or cloze accuracy. Works with every layout.

    Starts its local processes itself, or runs as a rank of torchrun.
    """
    from planner.capture.model.reference import named
    from runtime.evaluation.run import Evaluation, Weights, evaluate

    _check_options(options)
    weights = Weights(named(model, options.peft), options.load, options.ema)
    how = {"is_cloze": options.cloze, "stride": options.stride, "original_tokens": options.original_tokens}
    result = evaluate(Evaluation(weights, str(spec), options.data, tokenizer=options.tokenizer, **how), options.nproc)
    if result is None:
        return
    if options.format == "json":
        write_text(json.dumps({"data": options.data, **result.to_dict()}, indent=2), options.output)
    else:
        title = f"{'Cloze accuracy' if options.cloze else 'Perplexity'} on {options.data}"
        show_table(title, ("figure", "value"), result.rows(), options.output)


def _check_options(options: Options) -> None:
    """Raise PlanError for options that exclude each other."""
    if options.perplexity and options.cloze:
        raise PlanError("--perplexity and --cloze cannot be combined", where="--cloze", fix="remove one of them")
    for name, value in (("--stride", options.stride), ("--original-tokens", options.original_tokens)):
        if value is not None and options.cloze:
            raise PlanError(f"{name} applies to perplexity only", where=name, fix=f"remove {name} or --cloze")
