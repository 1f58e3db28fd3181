"""``--data SOURCE`` becomes Tokens: from a token file, or from text files, each of which is a document.

The end of the text may be held out for validation. Before training, ids are checked against the model's vocabulary: an
error names the source and the position of the id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from planner.spec.inputs import InputSpec
from runtime.data.text.documents import STDLIB, Split, files_of, parts
from runtime.data.text.encoders import ByteEncoder, Encoder, TokenizerFile
from runtime.data.token_batches import OF_IDS
from runtime.data.token_file import is_token_file, open_token_file
from runtime.data.tokens import ROW, WORD, Piece, Tokenization, Tokens, with_end

_SCANNED = 1 << 22  # ids or marks that are read at a time


def read_tokens(source: str, tokenizer: str | None = None) -> Tokens:
    """Return the tokens of a token file (memory-mapped), a text file, a directory, or Python's library (``stdlib``).

    ``tokenizer``: a ``tokenizers`` file that tokenizes the text; if None, each byte is a token. Raises PlanError for
    an empty source, or one that is neither text nor a token file.
    """
    if source != STDLIB and is_token_file(Path(source)):
        tokens = open_token_file(Path(source), source)
        if tokenizer is not None:
            what = f"{source} is already a token file, of the tokenizer {tokens.tokenization.name}"
            raise PlanError(what, where="--tokenizer", fix="remove --tokenizer")
        return tokens
    files = files_of(source)
    encoder: Encoder = ByteEncoder() if tokenizer is None else TokenizerFile(tokenizer)
    return gathered(source, encoder.tokenization, encoder.pieces(parts(files, Split.file)))


def gathered(source: str, tokenization: Tokenization, pieces: Iterable[Piece]) -> Tokens:
    """Return tokens in memory, with an end token after each document. Raises PlanError if there are none."""
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


def check_vocabulary(
    tokens: Tokens,
    inputs: Mapping[str, InputSpec],
    roles: Mapping[str, str],
    ranges: Mapping[str, Iterable[IdRange]],
) -> None:
    """Raise PlanError if an input takes fewer ids than the tokenization has.

    ``ranges``: input -> the ids that the model looks up by it, from the plan (``decisions.id_ranges``). The whole
    vocabulary counts, since an objective may draw any of its ids; the text is read only to name an id in the error.
    """
    for name, spec in inputs.items():
        if roles[name] not in OF_IDS:
            continue
        if spec.high is not None:
            _check(tokens, spec.high, f"inputs.{name}.high is {spec.high}", f"inputs.{name}.high")
        for ids in ranges.get(name, ()):
            _check(tokens, ids.high, f"{ids.what} has {ids.unit} 0 to {ids.high - 1}", f"inputs.{name}")


def _check(tokens: Tokens, high: int, what: str, where: str) -> None:
    how = tokens.tokenization
    if how.vocabulary_size <= high:
        return
    place = None if tokens.largest is not None and tokens.largest < high else _first_from(tokens.ids, high)
    if place is None:
        fact = f"the tokenizer {how.name} has ids up to {how.vocabulary_size - 1}"
    else:
        fact = f"{tokens.source} has the id {int(tokens.ids[place])} at position {place}"
    if how.name == "bytes":
        fact += "; text as bytes has tokens up to 255"
    fix = f"use a model with a vocabulary of at least {how.vocabulary_size} (and its high), or another tokenizer"
    raise PlanError(f"{fact}, but {what}", where=where, fix=fix)


def _first_from(ids: np.ndarray, high: int) -> int | None:
    """Return the position of the first id that is ``high`` or more."""
    for at in range(0, len(ids), _SCANNED):
        is_high = ids[at : at + _SCANNED] >= high
        if is_high.any():
            return at + int(is_high.argmax())
    return None


def split(tokens: Tokens, share: float) -> tuple[Tokens, Tokens | None]:
    """Return the training text, and the last ``share`` of the text, held out for validation (None if share is 0).

    The text is split at the nearest end of a document; a text of one document is split inside it. Samples with labels
    are split between rows. Raises PlanError if they come from a single row.
    """
    if not share:
        return tokens, None
    first, second = _cut(tokens, round((1.0 - share) * len(tokens.ids)))
    parts = f"{tokens.source} without its held-out part", f"the held-out part of {tokens.source}"
    return replace(first, source=parts[0]), replace(second, source=parts[1])


def _cut(tokens: Tokens, wanted: int) -> tuple[Tokens, Tokens]:
    if len(tokens.ends) == 1 and not tokens.is_supervised:
        return _inside(tokens, wanted)
    inner, documents = np.asarray(tokens.ends[:-1]), np.arange(len(tokens.ends) - 1)
    if tokens.is_supervised:  # samples of one row hold the same text: keep them on one side
        documents = documents[(tokens.marks[inner] & ROW) != 0]
        if not len(documents):
            what = f"{tokens.source} has one row, of which no part can be held out"
            raise PlanError(what, where="data.validation", fix="give more rows, or set validation: 0")
        inner = inner[documents]
    after = min(int(np.searchsorted(inner, wanted)), len(inner) - 1)
    before = max(after - 1, 0)
    last = int(documents[min((before, after), key=lambda d: abs(int(inner[d]) - wanted))])
    first, rest = slice(0, last + 1), slice(last + 1, None)
    end = int(tokens.ends[last])
    return (
        _part(tokens, 0, end, tokens.ends[first], tokens.words[first]),
        _part(tokens, end, len(tokens.ids), tokens.ends[rest] - end, tokens.words[rest]),
    )


def _part(tokens: Tokens, begin: int, end: int, ends: np.ndarray, words: np.ndarray) -> Tokens:
    ids, marks, identity = tokens.ids[begin:end], tokens.marks[begin:end], f"{tokens.identity} [{begin}:{end}]"
    return replace(tokens, ids=ids, marks=marks, ends=ends, words=words, identity=identity)


def _inside(tokens: Tokens, place: int) -> tuple[Tokens, Tokens]:
    """Return the two parts of a text that is one document."""
    in_end = sum(
        int(np.count_nonzero(tokens.marks[at : at + _SCANNED] & WORD))
        for at in range(place, len(tokens.marks), _SCANNED)
    )
    size, words = len(tokens.ids), int(tokens.words[0]) - in_end
    return (
        _part(tokens, 0, place, np.array([place]), np.array([words])),
        _part(tokens, place, size, np.array([size - place]), np.array([in_end])),
    )
