"""The command ``meshwright generate``: continue prompts with a model, under any layout."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from planner.cli import Format, Model, Output, Peft, SpecFile, write_text
from runtime.commands.options import Load, NumRanks, Tokenizer

EPILOG = (
    'Examples: meshwright generate examples/gpt.py:build examples/gpt.yaml --load run --prompt "def main" '
    '· meshwright generate hf:gpt2/ spec.yaml --tokenizer gpt2/ --prompt "The sea" --temperature 0.8 --top-p 0.9'
)


def generate_command(
    model: Model,
    spec: SpecFile,
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="A text to continue; give it several times.")],
    load: Load = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="With --load: use the running mean of the weights (optimizer.ema).")
    ] = False,
    tokenizer: Tokenizer = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="New tokens of each prompt; default: as many as fit, up to 64.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0: the most probable token; above it, tokens are sampled.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Sample among the K most probable tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample among the most probable tokens that have the share P together."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for sampling.")] = 0,
    nproc: NumRanks = None,
    format: Annotated[Format, typer.Option(help="Output format.")] = Format.table,
    output: Output = None,
    peft: Peft = None,
    no_kv_cache: Annotated[
        bool,
        typer.Option("--no-kv-cache", help="Keep no keys and values: each token runs the whole forward."),
    ] = False,
) -> None:
    """Continue texts with a model, to try it out. Works with every layout.

    Starts the local processes itself; under torchrun it is one of them.
    """
    from planner.capture.model.with_adapters import named
    from runtime.evaluation.weights import Weights
    from runtime.generation.run import Generation, generate
    from runtime.next_tokens.choice import Choice

    choice = Choice(temperature, top_k, top_p, seed)
    weights = Weights(named(model, peft), load, ema)
    cache = False if no_kv_cache else None
    found = generate(Generation(weights, str(spec), tuple(prompt), choice, max_new_tokens, tokenizer, cache), nproc)
    if found is None:
        return
    if format is Format.json:
        write_text(json.dumps([each.to_dict() for each in found], indent=2), output)
    else:
        write_text("\n\n".join(f"{each.prompt}{each.text}" for each in found), output)
