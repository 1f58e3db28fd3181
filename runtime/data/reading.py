"""``--data SOURCE`` becomes Tokens: of a token file, or of text, with each file as a document."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from passes.errors import PlanError
from runtime.data.text.byte_tokens import ByteEncoder
from runtime.data.text.documents import Split, parts
from runtime.data.text.pieces import Encoder, Piece, with_end
from runtime.data.text.sources import STDLIB, files_of
from runtime.data.text.tokenizer_file import TokenizerFile
from runtime.data.token_file import is_token_file, open_token_file
from runtime.data.tokens import Tokenization, Tokens


def read_tokens(source: str, tokenizer: str | None = None) -> Tokens:
    """The tokens of a token file (a map of it), of a text file or directory, or of Python's library for ``stdlib``.

    ``tokenizer``: a ``tokenizers`` file that tokenizes the text; else its bytes are the tokens. Raises PlanError if
    there is nothing to read, or if the content is of another kind.
    """
    if source != STDLIB and is_token_file(Path(source)):
        found = open_token_file(Path(source), source)
        if tokenizer is not None:
            what = f"{source} is already a token file, of the tokenizer {found.tokenization.name}"
            raise PlanError(what, where="--tokenizer", fix="remove --tokenizer")
        return found
    files = files_of(source)
    encoder: Encoder = ByteEncoder() if tokenizer is None else TokenizerFile(tokenizer)
    return gathered(source, encoder.tokenization, encoder.pieces(parts(files, Split.file)))


def gathered(source: str, tokenization: Tokenization, pieces: Iterable[Piece]) -> Tokens:
    """Tokens in memory, an end token after each document. Raises PlanError if there is none."""
    ids, marks, ends, words = [], [], [], []
    num_tokens = num_words = 0
    for piece in pieces:
        whole = with_end(piece, tokenization)
        ids.append(whole.ids)
        marks.append(whole.marks)
        num_tokens, num_words = num_tokens + len(whole.ids), num_words + piece.num_words
        if piece.closes:
            ends.append(num_tokens)
            words.append(num_words)
            num_words = 0
    if not num_tokens:
        raise PlanError("the data is empty", where=f"--data {source}", fix="name a text file, or write stdlib")
    arrays = np.concatenate(ids), np.array(ends, np.int64), np.concatenate(marks), np.array(words, np.int64)
    identity = xxhash.xxh3_128_hexdigest(b"".join(array.tobytes() for array in arrays[:3]))
    return Tokens(*arrays, tokenization, source, identity, int(arrays[0].max()))
