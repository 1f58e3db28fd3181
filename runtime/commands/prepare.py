"""The command ``meshwright prepare``: texts become a token file that training and evaluation memory-map."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from passes.errors import PlanError
from planner.commands.cli import show_table, write_text
from planner.files.text import shorten
from planner.progress import bar
from runtime.data.instruction.options import Instruction
from runtime.data.text.documents import Split
from runtime.options import option, takes

if TYPE_CHECKING:
    from runtime.data.token_file import Header

EPILOG = (
    "Examples: meshwright prepare book.txt -o book.tokens · meshwright prepare texts/ more.txt -o all.tokens "
    "--tokenizer tokenizer.json --split-documents blank-line · meshwright prepare web.jsonl -o web.tokens "
    "--split-documents json --field text · meshwright prepare chat.jsonl -o sft.tokens --tokenizer DIR --chat messages"
)
TABLE = "Documents by the shortest sequence that holds them; longer ones are cut"
COLUMNS = ("up to", "documents", "tokens", "padding", "mean document")

_MOST_DIGITS = 12  # of a length, so that every length fits into int64


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, except those of instruction data."""

    output: Path = option("Token file to write.", "FILE", "-o", "--output", default=MISSING)
    tokenizer: str | None = option(
        "A tokenizer.json of the library `tokenizers`, or a model's directory; default: bytes are the tokens.",
        "FILE|DIR",
    )
    split_documents: Split = option(
        "Unit that is one document: a file, a line, a block between blank lines, or a JSON row.", default=Split.file
    )
    field: str | None = option("With --split-documents json: field of the text; default: text.", "NAME")
    end_token: str | None = option("Token at the end of a document, if the tokenizer does not define one.", "TOKEN")
    bucket: str | None = option("Count the documents that fit into each of these sequence lengths.", "N,N,…")


@takes(Options, Instruction)
def prepare_command(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT…", help="Files, directories, or stdlib (Python's own source).")
    ],
    options: Options,
    instruction: Instruction,
) -> None:
    """Tokenize texts, or conversations with their answers as labels, into a file that training memory-maps."""
    from runtime.data.buckets import rows_of
    from runtime.data.instruction.prepare import prepare_samples
    from runtime.data.objectives.samples import counts_of
    from runtime.data.reading import read_tokens
    from runtime.data.text.documents import parts, size_of
    from runtime.data.text.encoders import ByteEncoder, TokenizerFile
    from runtime.data.token_writer import prepare, texts_of

    tokenizer, output = options.tokenizer, options.output
    lengths, is_of_samples, notes = _lengths(options.bucket), instruction.makes_samples(tokenizer), []
    is_of_rows = is_of_samples or instruction.text is not None
    _check_options(options, is_of_rows=is_of_rows, is_of_samples=is_of_samples)
    files = texts_of(texts, output)
    with bar("reading", sum(map(size_of, files)), of_bytes=True) as advance:
        if is_of_samples and tokenizer is not None:
            header, notes = prepare_samples(files, output, tokenizer, instruction, advance)
        else:
            begins = instruction.begin_token == "auto"
            encoder = ByteEncoder() if tokenizer is None else TokenizerFile(tokenizer, options.end_token, begins=begins)
            split = Split.json if is_of_rows else options.split_documents
            name = instruction.text or options.field or "text"
            read = partial(parts, files, split, name, of_datasets=instruction.split)
            header = prepare(read, output, encoder, advance)
    write_text("\n".join(notes if instruction.json else [summary(header, output), *notes]))
    if instruction.length is not None and not instruction.json:
        write_text(counts_of(read_tokens(str(output)), instruction.length))
    if lengths and not instruction.json:
        show_table(TABLE, COLUMNS, rows_of(read_tokens(str(output)), lengths))


def _lengths(text: str | None) -> list[int]:
    """Return the ascending lengths in ``text``. Raises PlanError for other text."""
    parts = [] if text is None else text.split(",")
    lengths = [int(part) for part in parts if part.strip().isdecimal() and len(part) <= _MOST_DIGITS and int(part)]
    if len(lengths) < len(parts) or lengths != sorted(set(lengths)):
        what = f"--bucket {shorten(text, 60)}: not a list of ascending lengths"
        raise PlanError(what, where="--bucket", fix="write 256,512,1024")
    return lengths


def _check_options(options: Options, *, is_of_rows: bool, is_of_samples: bool) -> None:
    """Raise PlanError for an option without effect."""
    split, end_token = options.split_documents, options.end_token
    if (is_of_rows and split is not Split.file) or (is_of_samples and end_token is not None):
        what = "--split-documents and --end-token apply to texts: each row is a document, and templates end answers"
        raise PlanError(what, where="--split-documents", fix="remove these options")
    if options.field is not None and split is not Split.json:
        fix = "add --split-documents json, or remove --field"
        raise PlanError("--field applies only to JSON", where="--field", fix=fix)
    if end_token is not None and options.tokenizer is None:
        what, fix = "--end-token needs a tokenizer: without one, the byte 0 ends a document", "add --tokenizer"
        raise PlanError(what, where="--end-token", fix=f"{fix}, or remove --end-token")


def summary(header: Header, output: Path) -> str:
    """Return the summary of the token file, in two lines."""
    special = ", ".join(f"{use} {index}" for use, index in header.special.items()) or "none"
    if header.supervised:
        share = f"{header.words:,} of them labels ({header.words / header.tokens:.1%})"
        counts = f"{header.documents:,} samples, {header.tokens:,} tokens, {share}"
    else:
        a_word = f"{header.tokens / header.words if header.words else 0.0:.2f} tokens a word"
        counts = f"{header.documents:,} documents, {header.tokens:,} tokens, {header.words:,} words ({a_word})"
    return (
        f"{output}: {counts}, from {header.bytes:,} bytes of text\n"
        f"tokenizer {header.tokenization}: vocabulary {header.vocabulary_size:,}, ids as {header.dtype}, "
        f"{header.num_bytes:,} bytes in the file; special: {special}"
    )
