"""The command ``meshwright generate``: continue prompts with a model, under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from passes.errors import PlanError
from planner.cli import Format, Model, Output, Peft, SpecFile, write_text
from runtime.commands.options import Load, NumRanks, Tokenizer

EPILOG = (
    'Examples: meshwright generate examples/gpt.py:build examples/gpt.yaml --load run --prompt "def main" '
    '· meshwright generate hf:gpt2/ spec.yaml --tokenizer gpt2/ --prompt "The sea" --temperature 0.8 --top-p 0.9'
)


def generate_command(
    model: Model,
    spec: SpecFile,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to continue; give it several times.")
    ] = None,
    chat: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A message that the model answers, by its chat template.")
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A conversation that the model answers.")
    ] = None,
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
    from planner.capture.model.reference import named
    from runtime.engine.next_tokens import Choice
    from runtime.evaluation.run import Generation, Weights, generate

    prompts, tokenizer = _prompts(model, prompt or [], chat, messages, tokenizer, load)
    choice = Choice(temperature, top_k, top_p, seed)
    weights = Weights(named(model, peft), load, ema)
    cache = False if no_kv_cache else None
    found = generate(Generation(weights, str(spec), prompts, choice, max_new_tokens, tokenizer, cache), nproc)
    if found is None:
        return
    if format is Format.json:
        write_text(json.dumps([each.to_dict() for each in found], indent=2), output)
    else:
        is_chat = chat is not None or messages is not None
        write_text("\n\n".join(each.text if is_chat else f"{each.prompt}{each.text}" for each in found), output)


def _prompts(
    model: str, prompt: list[str], chat: str | None, messages: Path | None, tokenizer: str | None, load: str | None
) -> tuple[tuple[str, ...], str | None]:
    """The texts to continue, and their tokenizer: with --chat or --messages, by default that of the run, else of a
    ``hf:`` directory.

    Raises PlanError.
    """
    if bool(prompt) + (chat is not None) + (messages is not None) != 1:
        what = "give one of --prompt, --chat and --messages"
        raise PlanError(what, where="--prompt", fix="add --prompt TEXT, to continue it, or --chat TEXT, to answer it")
    if prompt:
        return tuple(prompt), tokenizer
    from planner.files.text import read_json
    from runtime.data.instruction.chat_tokenizer import ChatTokenizer
    from runtime.data.instruction.conversation import conversation_of
    from runtime.engine.prompts import tokenizer_in

    tokenizer = tokenizer or _tokenizer_of_run(load) or model.removeprefix("hf:")
    asked = [{"role": "user", "content": chat}]
    if messages is not None:
        asked = read_json(messages, "conversation", fix="write a list of objects with role and content")
    try:
        row = {"messages": [*asked, {"role": "assistant", "content": "x"}]} if isinstance(asked, list) else {}
        talk = conversation_of(row, "messages", None, "all").messages[:-1]
        with tokenizer_in(tokenizer) as place:
            return (ChatTokenizer(place).render(talk, None, generates=True),), tokenizer
    except PlanError as error:
        raise error if error.where else PlanError(error.what, where="--messages", fix=error.fix) from None


def _tokenizer_of_run(load: str | None) -> str | None:
    """The directory that the run of a save keeps its tokenizer in, if it has one. Raises PlanError for no save."""
    from runtime.checkpoint.model_files import FOLDER
    from runtime.checkpoint.saves import resolve

    directory = None if load is None else resolve(Path(load)).parent / FOLDER
    return str(directory) if directory is not None and (directory / "tokenizer.json").is_file() else None
