"""``--data SOURCE`` becomes Tokens: each file of it is a document, which an end token closes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from planner.errors import PlanError
from runtime.data.text.byte_tokens import BYTES, ByteEncoder
from runtime.data.text.pieces import Piece
from runtime.data.text.sources import files_of
from runtime.data.tokens import Tokenization, Tokens


def read_tokens(source: str, tokenizer: str | None = None) -> Tokens:
    """The tokens of a token file, of a text file or directory as bytes, or of Python's library for ``stdlib``.

    ``tokenizer``: a ``tokenizers`` file, to cut text by instead. Raises PlanError if there is nothing to read.
    """
    if tokenizer is not None:
        raise PlanError("a tokenizer is not read yet", where="--tokenizer", fix="leave it out")
    return gathered(source, BYTES, _bytes_of(source))


def _bytes_of(source: str) -> Iterator[Piece]:
    for file in files_of(source):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PlanError(f"cannot read {file}: {error.strerror}", where=f"--data {source}") from error
        if content:
            yield ByteEncoder().encode(content)


def gathered(source: str, tokenization: Tokenization, documents: Iterator[Piece]) -> Tokens:
    """Tokens in memory, an end token after each document. Raises PlanError where there is none."""
    pieces = list(documents)
    if not pieces:
        raise PlanError("the data holds no bytes", where=f"--data {source}", fix="name a text file, or write stdlib")
    end = tokenization.special.get("end")
    closing = np.array([] if end is None else [end], pieces[0].ids.dtype)
    ids = np.concatenate([part for piece in pieces for part in (piece.ids, closing)])
    marks = np.concatenate([part for piece in pieces for part in (piece.marks, np.zeros(len(closing), np.uint8))])
    ends = np.cumsum([len(piece.ids) + len(closing) for piece in pieces])
    words = np.array([piece.num_words for piece in pieces])
    identity = xxhash.xxh3_128_hexdigest(ids.tobytes() + ends.tobytes())
    return Tokens(ids, ends, marks, words, tokenization, source, identity)
