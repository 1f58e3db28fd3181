"""Text becomes marked tokens, by a file of the ``tokenizers`` library or as bytes.

As bytes, token i is byte i: no tokenizer is needed. Special ids are control bytes that do not occur in text: 0 ends a
document and pads, 1 classifies, 26 masks, 28 separates.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from passes.errors import PlanError, imported
from planner.files.text import MIB, is_file, read_json, read_text, shorten
from runtime.data.tokens import SENTENCE, WORD, Piece, TextPart, Tokenization, id_dtype

MOST_BYTES = 64 * MIB  # of one document, which is tokenized as a whole: parts could have other tokens
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
NUM_BYTES = 256
BYTES = Tokenization("bytes", NUM_BYTES, {"end": 0, "class": 1, "separator": 28, "mask": 26, "padding": 0})
_IS_SPACE = np.isin(np.arange(NUM_BYTES), list(b" \t\n\r\v\f"))
_IS_STOP = np.isin(np.arange(NUM_BYTES), list(b".!?"))
_NEWLINE = ord("\n")
_BEFORE_ALL = b". "  # a document begins with a sentence
_IS_SPECIAL = np.isin(np.arange(NUM_BYTES), list(BYTES.special.values()))


class TokenizerFile:
    """A tokenizer of the ``tokenizers`` library. ``end``: the token that closes a document; None: found by its name.

    ``begins``: begin each document with the tokenizer's begin token, if it adds one. ``ends``: ids that end a text.
    Raises PlanError if the library is missing, the file is not a tokenizer, or ``end`` is not in the vocabulary.
    """

    def __init__(self, path: str, end: str | None = None, *, begins: bool = False) -> None:
        self._tokenizer = _load(Path(path))
        self.tokenization = _tokenization(self._tokenizer, path, end)
        ends = [*end_ids(Path(path)), self.tokenization.special.get("end")]
        self.ends = tuple(dict.fromkeys(end for end in ends if end is not None))
        alone, added = (self._tokenizer.encode("a", add_special_tokens=more).ids for more in (False, True))
        self._begin = added[: added.index(alone[0])] if begins and alone and alone[0] in added else []

    def pieces(self, parts: Iterable[TextPart]) -> Iterator[Piece]:
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
        """Return the tokens of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode(self, texts: list[str]) -> Iterator[Piece]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array(encoding.ids, id_dtype(self.tokenization))
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            marks, num_words = marks_of(text, offsets)
            if self._begin:
                ids, marks = np.insert(ids, 0, self._begin), np.insert(marks, 0, [0] * len(self._begin))
            yield Piece(ids, marks, num_words)


def end_ids(directory: Path) -> list[int]:
    """Return the end tokens of a model's generation config; none without one. Raises PlanError if it is damaged."""
    path = directory / GENERATION_CONFIG
    if not is_file(path):
        return []
    config = read_json(path, "generation config", fix="copy it again")
    ends = config.get("eos_token_id") if isinstance(config, dict) else config
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        what = f"{shorten(path)}: eos_token_id is {shorten(ends, 60)}, and not ids of tokens"
        raise PlanError(what, where=shorten(path), fix="copy it again")
    return ends


def marks_of(text: str, offsets: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the marks of tokens, uint8 [tokens], and the number of words in ``text``.

    ``offsets``: first and last + 1 character of each token, [tokens, 2]. The token that holds the first character of a
    word is marked; if several tokens share the character, the first.
    """
    words = np.array([match.start() for match in _WORD.finditer(text)], np.int64)
    sentences = np.array([match.end() for match in _BEGINS_SENTENCE.finditer(text)], np.int64)
    marks = np.zeros(len(offsets), np.uint8)
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
    for places, bit in ((words, WORD), (sentences, SENTENCE)):
        tokens = np.searchsorted(ends, places, side="right")
        is_inside = tokens < len(offsets)
        is_inside[is_inside] = offsets[tokens[is_inside], 0] <= places[is_inside]
        marks[tokens[is_inside]] |= bit
    return marks, len(words)


def _documents(parts: Iterable[TextPart]) -> Iterator[list[TextPart]]:
    """Yield the parts of each document. Raises PlanError for one longer than ``MOST_BYTES``."""
    document: list[TextPart] = []
    num_bytes = 0
    for part in parts:
        document.append(part)
        num_bytes += len(part.content)
        if num_bytes > MOST_BYTES:
            what = f"a document of {shorten(part.file)} is longer than {MOST_BYTES // MIB} MiB"
            raise PlanError(what, where=document[0].where(0), fix="split it with --split-documents line or blank-line")
        if part.closes:
            yield document
            document, num_bytes = [], 0


def _decoded(document: list[TextPart]) -> str:
    content = b"".join(part.content for part in document)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"{shorten(document[0].file)} is not UTF-8: {error.reason}, 0x{content[error.start]:02x}"
        fix = "save the text as UTF-8, or remove --tokenizer to use its bytes"
        raise PlanError(what, where=document[0].where(error.start), fix=fix) from None


def _load(path: Path) -> Any:
    fix = "pip install 'meshwright[text]', or remove --tokenizer to use bytes"
    library = imported("tokenizers", "--tokenizer", where="--tokenizer", fix=fix)
    path = path / _FILE if path.is_dir() else path
    content = read_text(path, "tokenizer", most_bytes=256 * MIB, fix=_FIX)
    try:
        tokenizer = library.Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a b", add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # panics of the library are not an Exception
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


class ByteEncoder:
    """Bytes as tokens. Owns the last bytes of an open document, at most two: the marks of the next bytes need them.

    A word begins after white space. It begins a sentence if the white space follows ``.``, ``!`` or ``?``, or contains
    the end of a paragraph.
    """

    tokenization = BYTES
    ends = (BYTES.special["end"],)

    def __init__(self) -> None:
        self._before = _BEFORE_ALL

    def pieces(self, parts: Iterable[TextPart]) -> Iterator[Piece]:
        for part in parts:
            is_special = _IS_SPECIAL[np.frombuffer(part.content, np.uint8)]
            if is_special.any():
                at = int(is_special.argmax())
                what = f"{part.file} contains the byte {part.content[at]}, which cannot occur in text"
                fix = "give a text file, or a token file written by `meshwright prepare`"
                raise PlanError(what, where=part.where(at), fix=fix)
            yield self.encode(part.content, part.closes)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text: its bytes in UTF-8."""
        return list(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones; bytes that are not UTF-8 become replacement characters."""
        special = {*BYTES.special.values(), *(i for i in ids if i >= NUM_BYTES)}
        return bytes(i for i in ids if i not in special).decode(errors="replace")

    def encode(self, content: bytes, closes: bool = True) -> Piece:
        joined = np.frombuffer(self._before + content, np.uint8)
        skip = len(self._before)
        is_space = _IS_SPACE[joined]
        begins = np.flatnonzero(~is_space[1:] & is_space[:-1]) + 1
        # end of the word before each begin: `_before` starts with a character, so begins and ends alternate
        ends, breaks = np.flatnonzero(is_space[1:] & ~is_space[:-1])[: len(begins)], _breaks(joined, is_space)
        is_stopped = _IS_STOP[joined[ends]] | (np.searchsorted(breaks, ends) < np.searchsorted(breaks, begins))
        marks = np.zeros(len(joined), np.uint8)
        marks[begins] = WORD
        marks[begins[is_stopped]] |= SENTENCE
        self._before = _BEFORE_ALL if closes else _context(joined, is_space)
        return Piece(joined[skip:], marks[skip:], len(begins), closes)


Encoder = ByteEncoder | TokenizerFile


def _breaks(text: np.ndarray, is_space: np.ndarray) -> np.ndarray:
    """Return the places of newlines that are followed by more white space: ends of paragraphs."""
    newlines = np.flatnonzero(text[:-1] == _NEWLINE)
    return newlines[is_space[newlines + 1]]


def _context(text: np.ndarray, is_space: np.ndarray) -> bytes:
    """Return the fewest bytes that have the same effect on the marks of the following text as all of ``text``."""
    if not is_space[-1]:
        return text[-1:].tobytes()
    last = int(np.flatnonzero(~is_space)[-1])
    is_stop = _IS_STOP[text[last]] or _breaks(text[last:], is_space[last:]).size
    return (b"." if is_stop else b"a") + text[-1:].tobytes()
