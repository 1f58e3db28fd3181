"""The command ``meshwright generate``: continue prompts with a model, under any layout."""

import json
from dataclasses import dataclass
from pathlib import Path

from passes.errors import PlanError
from planner.commands.cli import Format, Model, Output, Peft, SpecFile, write_text
from runtime.options import Load, NumRanks, Tokenizer, flag, option, takes

EPILOG = (
    'Examples: meshwright generate examples/gpt.py:build examples/gpt.yaml --load run --prompt "def main" '
    '· meshwright generate hf:gpt2/ spec.yaml --tokenizer gpt2/ --prompt "The sea" --temperature 0.8 --top-p 0.9'
)


@dataclass(frozen=True, kw_only=True)
class Options:
    prompt: list[str] | None = option("A text to continue; may be repeated.", "TEXT")
    chat: str | None = option("A user message to answer, in the model's chat template.", "TEXT")
    messages: Path | None = option(
        "A conversation to answer: a JSON list of objects with role and content.", "FILE.json"
    )
    load: Load = None
    ema: bool = flag("With --load: use the running mean of the weights (optimizer.ema).")
    tokenizer: Tokenizer = None
    max_new_tokens: int | None = option("New tokens per prompt; default: as many as fit, up to 64.", "N")
    temperature: float = option("0: take the most probable token; above 0: sample.", "T", default=0.0)
    top_k: int | None = option("Sample among the K most probable tokens.", "K")
    top_p: float | None = option("Sample among the most probable tokens, up to a total probability of P.", "P")
    seed: int = option("Seed for sampling.", "N", default=0)
    nproc: NumRanks = None
    format: Format = option("Output format.", default="table")
    output: Output = None
    peft: Peft = None
    no_kv_cache: bool = flag("Cache no keys and values: run the whole forward for each new token.")


@takes(Options)
def generate_command(model: Model, spec: SpecFile, options: Options) -> None:
    """Continue texts with a model, to try it out. Works with every layout.

    Starts its local processes itself, or runs as a rank of torchrun.
    """
    from planner.capture.model.reference import named
    from runtime.engine.next_tokens import Choice
    from runtime.evaluation.run import Generation, Weights, generate

    prompts, tokenizer = _prompts(model, options)
    choice = Choice(options.temperature, options.top_k, options.top_p, options.seed)
    weights = Weights(named(model, options.peft), options.load, options.ema)
    cache = False if options.no_kv_cache else None
    generation = Generation(weights, str(spec), prompts, choice, options.max_new_tokens, cache, tokenizer=tokenizer)
    if (continued := generate(generation, options.nproc)) is None:
        return
    if options.format == "json":
        write_text(json.dumps([each.to_dict() for each in continued], indent=2), options.output)
    else:
        is_chat = not options.prompt
        texts = (each.text if is_chat else f"{each.prompt}{each.text}" for each in continued)
        write_text("\n\n".join(texts), options.output)


def _prompts(model: str, options: Options) -> tuple[tuple[str, ...], str | None]:
    """Return the texts to continue, and their tokenizer.

    --chat and --messages default to the tokenizer of the run of --load, else of MODEL's directory. Raises PlanError.
    """
    if bool(options.prompt) + (options.chat is not None) + (options.messages is not None) != 1:
        what = "give one of --prompt, --chat and --messages"
        raise PlanError(what, where="--prompt", fix="add --prompt TEXT, to continue it, or --chat TEXT, to answer it")
    if options.prompt:
        return tuple(options.prompt), options.tokenizer
    from planner.files.text import read_json
    from runtime.data.instruction.chat_tokenizer import ChatTokenizer
    from runtime.data.instruction.conversation import conversation_of
    from runtime.engine.prompts import tokenizer_in

    tokenizer = options.tokenizer or _tokenizer_of_run(options.load) or model.removeprefix("hf:")
    messages = [{"role": "user", "content": options.chat}]
    if options.messages is not None:
        messages = read_json(options.messages, "conversation", fix="write a list of objects with role and content")
    try:
        row = {"messages": [*messages, {"role": "assistant", "content": "x"}]} if isinstance(messages, list) else {}
        talk = conversation_of(row, "messages", None, "all").messages[:-1]
        with tokenizer_in(tokenizer) as place:
            return (ChatTokenizer(place).render(talk, None, generates=True),), tokenizer
    except PlanError as error:
        raise error if error.where else PlanError(error.what, where="--messages", fix=error.fix) from None


def _tokenizer_of_run(load: str | None) -> str | None:
    """Return the tokenizer directory of the run that wrote the save ``load``, or None. Raises PlanError for no save."""
    from runtime.checkpoint.model_files import FOLDER
    from runtime.checkpoint.saves import resolve

    directory = None if load is None else resolve(Path(load)).parent / FOLDER
    return str(directory) if directory is not None and (directory / "tokenizer.json").is_file() else None
