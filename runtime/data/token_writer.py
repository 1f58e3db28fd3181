"""Writes a token file piece by piece and atomically: memory does not grow with the size of the text."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO, Self

import numpy as np
import xxhash

from passes.errors import PlanError
from planner.files.atomic import Replacement
from planner.files.text import MIB, check_file, shorten, writing
from runtime.data.text.documents import sources_of
from runtime.data.text.encoders import Encoder
from runtime.data.token_file import BEGIN, Header, is_token_file
from runtime.data.tokens import Piece, TextPart, Tokenization, id_dtype, with_end

_SECTIONS = ("ids", "marks", "ends", "words")
_DTYPES = {name: np.dtype(kind) for name, kind in (("marks", "u1"), ("files", "u1"), ("ends", "<i8"), ("words", "<i8"))}


class TokenWriter:
    """Writer of one token file. Owns a temporary file beside it, which replaces it on success, else is removed.

    Ids are written to their final place; marks, ends and words, which follow all ids, go to unnamed temporary files
    first. Sections are buffered up to a MiB: one write takes longer than tokenizing one short sample.
    ``files``: the tokenizer's files by name, for samples with labels. ``on_bytes`` is called with counts of read bytes.
    """

    def __init__(
        self,
        path: Path,
        tokenization: Tokenization,
        files: Mapping[str, bytes] | None = None,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.path, self.tokenization, self._more, self._on_bytes = path, tokenization, files, on_bytes
        self.num_tokens = self.num_documents = self.num_words = self._num_bytes = 0
        self._largest = self._words_open = self._tokens_open = 0
        self._sections = _SECTIONS if files is None else (*_SECTIONS, "files")
        self._dtypes = _DTYPES | {"ids": id_dtype(tokenization).newbyteorder("<")}
        self._waiting: dict[str, list[bytes]] = {name: [] for name in self._sections}
        self._num_waiting: dict[str, int] = dict.fromkeys(self._sections, 0)
        self._digests = {name: xxhash.xxh3_128() for name in self._sections}
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_file(self.path, "-o")
        with self._writing():
            folder = self.path.parent
            self._new = Replacement(self.path)
            self._stack.callback(self._new.discard)
            self._files["ids"] = self._new.file
            self._files["ids"].write(bytes(BEGIN))
            for name in self._sections[1:]:
                self._files[name] = self._stack.enter_context(tempfile.TemporaryFile(dir=folder))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append pieces of documents, in order. A document without tokens is left out. Raises PlanError."""
        for piece in pieces:
            whole = with_end(piece, self.tokenization)
            self._tokens_open += len(piece.ids)
            self._words_open += piece.num_words
            if self._tokens_open:
                self._write("ids", whole.ids)
                self._write("marks", whole.marks)
                self.num_tokens += len(whole.ids)
                if piece.closes:
                    self._write("ends", np.array([self.num_tokens]))
                    self._write("words", np.array([self._words_open]))
                    self.num_documents += 1
                    self.num_words += self._words_open
            if piece.closes:
                self._words_open = self._tokens_open = 0

    def add_documents(self, ids: np.ndarray, marks: np.ndarray, sizes: np.ndarray, words: np.ndarray) -> None:
        """Append whole documents, with end tokens: ids and marks [tokens], sizes and words [documents].

        Raises PlanError if the file cannot be written.
        """
        self._write("ids", ids)
        self._write("marks", marks)
        self._write("ends", self.num_tokens + np.cumsum(sizes))
        self._write("words", words)
        self.num_tokens += len(ids)
        self.num_documents += len(sizes)
        self.num_words += int(words.sum())

    def note_read(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more bytes of the text as read."""
        self._num_bytes += num_bytes
        self._on_bytes(num_bytes)

    def finish(self, options: Mapping[str, str] | None = None) -> Header:
        """Complete the file under its name and return its header. ``options``: those that shaped samples with labels.

        Raises PlanError for an empty text, or if the file cannot be written.
        """
        if not self.num_documents:
            raise PlanError("the text is empty", where="TEXT", fix="give a text that is not empty")
        for content in (self._more or {}).values():
            self._write("files", np.frombuffer(content, np.uint8))
        for name in self._sections:
            self._flush(name)
        header = self._header(options)
        with self._writing():
            whole = self._files["ids"]
            for name, _, _, begin in header.sections():
                if name != "ids":
                    whole.write(bytes(begin - whole.tell()))
                    self._files[name].seek(0)
                    shutil.copyfileobj(self._files[name], whole, MIB)
            whole.write(bytes(header.num_bytes - whole.tell()))
            whole.seek(0)
            whole.write(header.packed())
            self._new.take_place()
        return header

    def _header(self, options: Mapping[str, str] | None) -> Header:
        how = self.tokenization
        sizes = None if self._more is None else {name: len(content) for name, content in self._more.items()}
        return Header(
            tokens=self.num_tokens,
            documents=self.num_documents,
            words=self.num_words,
            bytes=self._num_bytes,
            dtype=id_dtype(how).name,  # pyright: ignore[reportArgumentType]
            largest=self._largest,
            tokenization=how.name,
            vocabulary_size=how.vocabulary_size,
            special=dict(how.special),
            content={name: digest.hexdigest() for name, digest in self._digests.items()},
            supervised=None if sizes is None else True,
            files=sizes,
            made=None if options is None else dict(options),
        )

    def _write(self, name: str, values: np.ndarray) -> None:
        content = values.astype(self._dtypes[name], copy=False).tobytes()
        self._waiting[name].append(content)
        self._num_waiting[name] += len(content)
        if self._num_waiting[name] >= MIB:
            self._flush(name)

    def _flush(self, name: str) -> None:
        content = b"".join(self._waiting[name])
        self._waiting[name], self._num_waiting[name] = [], 0
        if name == "ids":
            largest = np.frombuffer(content, self._dtypes[name]).max(initial=0)
            self._largest = max(self._largest, int(largest))
        self._digests[name].update(content)
        with self._writing():
            self._files[name].write(content)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(shorten(self.path), "-o", "give a writable file, and free space there")


def texts_of(sources: Iterable[str], output: Path) -> list[Path]:
    """Return all files of the sources. Raises PlanError if one is the output file, or a token file."""
    files = sources_of(sources)
    check_file(output, "-o")
    for file in files:
        if output.exists() and os.path.samefile(file, output):
            what = f"{shorten(output)} is one of the texts and would be overwritten"
            raise PlanError(what, where="-o", fix="choose another output file")
        if is_token_file(file):
            raise PlanError(f"{shorten(file)} is already a token file", where=shorten(file), fix="name texts")
    return files


def prepare(
    read: Callable[..., Iterable[TextPart]],
    output: Path,
    encoder: Encoder,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Header:
    """Write the tokens of a text to ``output``, and return the header.

    ``read``: ``parts`` with its files bound. ``on_bytes`` is called with counts of read bytes. Raises PlanError for
    files that cannot be read or written, are not text or are empty, and then leaves no output file.
    """
    with TokenWriter(output, encoder.tokenization, on_bytes=on_bytes) as writer:
        writer.add(encoder.pieces(read(on_bytes=writer.note_read)))
        return writer.finish()
