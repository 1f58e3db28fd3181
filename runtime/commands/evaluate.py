"""The command ``meshwright evaluate``: perplexity or cloze accuracy of a model on a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

from passes.errors import PlanError
from planner.cli import Format, Model, Output, Peft, SpecFile, show_table, write_text
from runtime.commands.options import Load, NumRanks, Tokenizer

EPILOG = (
    "Examples: meshwright evaluate examples/gpt.py:build examples/gpt.yaml --data book.txt --load checkpoints "
    "· meshwright evaluate hf:gpt2/ spec.yaml --data passages.tokens --cloze --format json"
)


def evaluate_command(
    model: Model,
    spec: SpecFile,
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH|stdlib", help="Token file; or text file or directory; or stdlib (Python's own source)."
        ),
    ],
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Perplexity over sliding windows (the default).")
    ] = False,
    cloze: Annotated[
        bool, typer.Option("--cloze", help="Cloze accuracy: predict all tokens of the last word of each document.")
    ] = False,
    tokenizer: Tokenizer = None,
    load: Load = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="With --load: evaluate the running mean of the weights (optimizer.ema).")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens between the starts of windows; default: 32, or less for short windows.",
        ),
    ] = None,
    original_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of tokens that normalizes perplexity; default: the number of words."
        ),
    ] = None,
    nproc: NumRanks = None,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
    peft: Peft = None,
) -> None:
    """Evaluate a language model on held-out text: perplexity or cloze accuracy. Works with every layout.

    Starts the local processes itself; under torchrun it is one of them.
    """
    from planner.capture.model.reference import named
    from runtime.evaluation.run import Evaluation, Weights, evaluate

    _check_options(perplexity, cloze, {"--stride": stride, "--original-tokens": original_tokens})
    weights = Weights(named(model, peft), load, ema)
    found = evaluate(Evaluation(weights, str(spec), data, tokenizer, cloze, stride, original_tokens), nproc)
    if found is None:
        return
    if format is Format.json:
        write_text(json.dumps({"data": data, **found.to_dict()}, indent=2), output)
    else:
        title = f"{'Cloze accuracy' if cloze else 'Perplexity'} on {data}"
        show_table(title, ("figure", "value"), found.rows(), output)


def _check_options(perplexity: bool, cloze: bool, of_perplexity: Mapping[str, int | None]) -> None:
    """Raises PlanError for options that exclude each other."""
    if perplexity and cloze:
        raise PlanError("--perplexity and --cloze cannot be combined", where="--cloze", fix="remove one of them")
    for option, value in of_perplexity.items():
        if value is not None and cloze:
            raise PlanError(f"{option} applies to perplexity only", where=option, fix=f"remove {option} or --cloze")
