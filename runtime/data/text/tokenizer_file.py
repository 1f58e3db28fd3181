"""Text cut by a file of the ``tokenizers`` library: any that it reads, with the marks of the text it was cut from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from passes.errors import PlanError
from planner.files.json_text import read_json
from planner.files.text import MIB, is_file, read_text, shorten
from runtime.data.text.pieces import Part, Piece, id_dtype
from runtime.data.tokens import SENTENCE, WORD, Tokenization

MOST_BYTES = 64 * MIB  # of one document: cut apart, it could give other tokens
_BATCH_BYTES = MIB
_FILE = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
_FIX = "give the model's tokenizer.json, as written by the library `tokenizers`"
_KNOWN = {
    "end": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "class": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}
_WORD = re.compile(r"\S+")
_BEGINS_SENTENCE = re.compile(r"\A\s*(?=\S)|(?<=[.!?])\s+(?=\S)|\n\s+(?=\S)")


class TokenizerFile:
    """Documents through a tokenizer. ``end``: the token that closes a document; None: the one that it is known to have.
    ``begins``: each document begins with the token that the tokenizer puts there, if it does.

    Raises PlanError if the library is missing, the file is none of its, or ``end`` is none of its tokens.
    """

    def __init__(self, path: str, end: str | None = None, *, begins: bool = False) -> None:
        self._tokenizer = _load(Path(path))
        self.tokenization = _tokenization(self._tokenizer, path, end)
        ends = [*end_ids(Path(path)), self.tokenization.special.get("end")]
        self.ends = tuple(dict.fromkeys(end for end in ends if end is not None))
        alone, added = (self._tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
        self._begin = added[: added.index(alone[0])] if begins and alone and alone[0] in added else []

    def pieces(self, parts: Iterable[Part]) -> Iterator[Piece]:
        batch: list[str] = []
        num_bytes = 0
        for document in _documents(parts):
            batch.append(_decoded(document))
            num_bytes += sum(len(part.content) for part in document)
            if num_bytes >= _BATCH_BYTES:
                yield from self._encode(batch)
                batch, num_bytes = [], 0
        yield from self._encode(batch)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without special ones around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode(self, texts: list[str]) -> Iterator[Piece]:
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, found, strict=True):
            ids = np.array(encoding.ids, id_dtype(self.tokenization))
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            marks, num_words = marks_of(text, offsets)
            if self._begin:
                ids, marks = np.insert(ids, 0, self._begin), np.insert(marks, 0, [0] * len(self._begin))
            yield Piece(ids, marks, num_words)


def end_ids(directory: Path) -> list[int]:
    """The end tokens of the generation config of a model; empty without one. Raises PlanError if it is damaged."""
    path = directory / GENERATION_CONFIG
    if not is_file(path):
        return []
    found = read_json(path, "generation config", fix="copy it again")
    ends = found.get("eos_token_id") if isinstance(found, dict) else found
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        what = f"{shorten(path)}: eos_token_id is {shorten(ends, 60)}, and not ids of tokens"
        raise PlanError(what, where=shorten(path), fix="copy it again")
    return ends


def marks_of(text: str, offsets: np.ndarray) -> tuple[np.ndarray, int]:
    """The marks of tokens with the characters ``offsets`` [tokens, 2], and the number of words in ``text``.

    The token that holds the first character of a word is marked; if several share it, the first.
    """
    words = np.array([found.start() for found in _WORD.finditer(text)], np.int64)
    sentences = np.array([found.end() for found in _BEGINS_SENTENCE.finditer(text)], np.int64)
    marks = np.zeros(len(offsets), np.uint8)
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
    for places, bit in ((words, WORD), (sentences, SENTENCE)):
        tokens = np.searchsorted(ends, places, side="right")
        is_held = tokens < len(offsets)
        is_held[is_held] = offsets[tokens[is_held], 0] <= places[is_held]
        marks[tokens[is_held]] |= bit
    return marks, len(words)


def _documents(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts of each document. Raises PlanError for one that is too long."""
    found: list[Part] = []
    num_bytes = 0
    for part in parts:
        found.append(part)
        num_bytes += len(part.content)
        if num_bytes > MOST_BYTES:
            raise PlanError(
                f"a document of {shorten(part.file)} is longer than {MOST_BYTES // MIB} MiB",
                where=found[0].where(0),
                fix="split it with --split-documents line or blank-line",
            )
        if part.closes:
            yield found
            found, num_bytes = [], 0


def _decoded(document: list[Part]) -> str:
    content = b"".join(part.content for part in document)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{shorten(document[0].file)} is not UTF-8: {error.reason}, 0x{content[error.start]:02x}",
            where=document[0].where(error.start),
            fix="save the text as UTF-8, or remove --tokenizer to use its bytes",
        ) from None


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PlanError(
            "the library `tokenizers` is not installed",
            where="--tokenizer",
            fix="pip install 'meshwright[text]', or remove --tokenizer to use bytes",
        ) from None
    path = path / _FILE if path.is_dir() else path
    content = read_text(path, "tokenizer", most_bytes=256 * MIB, fix=_FIX)
    try:
        tokenizer = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a b", add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's own panics are no Exception
        words = shorten(str(error).strip() or type(error).__name__, 120)
        raise PlanError(f"{shorten(path)} is not a valid tokenizer: {words}", where=shorten(path), fix=_FIX) from None
    return tokenizer


def _tokenization(tokenizer: Any, path: str, end: str | None) -> Tokenization:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise PlanError(f"{shorten(path)} is a tokenizer without tokens", where=shorten(path), fix=_FIX)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = {
        use: vocabulary[token]
        for use, names in _KNOWN.items()
        for token in [next((name for name in names if name in added), None)]
        if token is not None
    }
    if end is not None:
        if end not in vocabulary:
            fix = "use a token of the vocabulary"
            raise PlanError(f"the tokenizer has no token {end!r}", where="--end-token", fix=fix)
        special["end"] = vocabulary[end]
    return Tokenization(Path(path).name, max(vocabulary.values()) + 1, special)
