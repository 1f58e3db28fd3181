"""Texts become one token file, in one pass over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from passes.errors import PlanError
from planner.files.text import shorten
from runtime.data.text.documents import Split, parts
from runtime.data.text.pieces import Encoder
from runtime.data.text.rows import sources_of
from runtime.data.token_file import Header, is_token_file
from runtime.data.token_writer import TokenWriter, check_writable


def texts_of(sources: Iterable[str], output: Path) -> list[Path]:
    """Every file of the sources. Raises PlanError if one is the output, or a token file."""
    files = sources_of(sources)
    check_writable(output)
    for file in files:
        if output.exists() and os.path.samefile(file, output):
            what = f"{shorten(output)} is one of the texts and would be overwritten"
            raise PlanError(what, where="-o", fix="choose another output file")
        if is_token_file(file):
            raise PlanError(f"{shorten(file)} is already a token file", where=shorten(file), fix="name texts")
    return files


def prepare(
    files: Iterable[Path],
    output: Path,
    encoder: Encoder,
    split: Split = Split.file,
    field: str = "text",
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    of_datasets: str | None = None,
) -> Header:
    """Write the tokens of ``files`` to ``output``, and return its header. ``on_bytes`` gets counts of read bytes.
    ``field``, ``of_datasets``: of ``Split.json``.

    Raises PlanError for files that cannot be read, are no text, are empty, or cannot be written; no output stays then.
    """
    num_bytes = 0

    def read(count: int) -> None:
        nonlocal num_bytes
        num_bytes += count
        on_bytes(count)

    with TokenWriter(output, encoder.tokenization) as writer:
        writer.add(encoder.pieces(parts(files, split, field, read, of_datasets)))
        return writer.finish(num_bytes)
