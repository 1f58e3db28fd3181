"""The command ``meshwright evaluate``: perplexity or cloze accuracy of a model on a text."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from planner.cli import Format, Model, NoCache, Output, SpecFile, show_table, write_text
from planner.errors import PlanError

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
            metavar="PATH|stdlib", help="A token file; or a text file or directory, read as bytes; or stdlib."
        ),
    ],
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Over sliding windows; so it is if nothing is asked for.")
    ] = False,
    cloze: Annotated[bool, typer.Option("--cloze", help="Of each document the last word, every token of it.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="A tokenizer.json that cuts the text; if not given, bytes.")
    ] = None,
    load: Annotated[
        str | None, typer.Option(metavar="DIR", help="Weights: a save of train, or a directory of saves; any layout.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="With --load: the running mean of the weights (optimizer.ema of the spec).")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens from one window to the next; 32, or a window, if not given."),
    ] = None,
    original_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="What perplexity is normalised by; the text's words if not given."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Local processes to start; the mesh's size if not given.")] = None,
    format: Annotated[Format, typer.Option(help="How to print what was found.")] = Format.table,
    output: Output = None,
    no_cache: NoCache = False,
) -> None:
    """Measure how well a model tells a text: perplexity, or cloze accuracy. Under any layout, without gradients.

    Starts the local processes itself; under torchrun it is one of them.
    """
    from runtime.evaluation.run import Evaluation, evaluate

    if perplexity and cloze:
        raise PlanError("--perplexity and --cloze are two measures", where="--cloze", fix="ask for one of them")
    for option, value in (("--stride", stride), ("--original-tokens", original_tokens)):
        if value is not None and cloze:
            raise PlanError(f"{option} is of perplexity", where=option, fix=f"leave out {option} or --cloze")
    if ema and load is None:
        raise PlanError("--ema says which weights of a save are scored", where="--ema", fix="add --load DIR")
    asked = Evaluation(model, str(spec), data, tokenizer, cloze, stride, original_tokens, load, averaged=ema)
    found = evaluate(asked, nproc)
    if found is None:
        return
    if format is Format.json:
        write_text(json.dumps({"data": data, **found.to_dict()}, indent=2), output)
    else:
        title = f"{'Cloze accuracy' if cloze else 'Perplexity'} on {data}"
        show_table(title, ("figure", "value"), found.rows(), output)
