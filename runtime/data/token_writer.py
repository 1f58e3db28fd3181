"""Writes a token file as tokens come: memory does not grow with the text, and a reader sees all of it or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Self

import numpy as np
import xxhash

from passes.errors import PlanError
from planner.files.atomic import Replacement
from planner.files.text import MIB, is_directory, reason, shorten
from runtime.data.text.pieces import Piece, id_dtype, with_end
from runtime.data.token_file import BEGIN, Header
from runtime.data.tokens import Tokenization

_SECTIONS = ("ids", "marks", "ends", "words")


class TokenWriter:
    """One token file. Owns a file beside it until that is complete and takes its name; a failed one is removed.

    Ids are written in their place; marks, ends and words wait in files without a name, since they come after all ids.
    ``files``: of samples with labels, those of their tokenizer by name.
    """

    def __init__(self, path: Path, tokenization: Tokenization, files: Mapping[str, bytes] | None = None) -> None:
        self.path, self.tokenization, self._more = path, tokenization, files
        self.num_tokens = self.num_documents = self.num_words = 0
        self._largest = self._words_open = self._tokens_open = 0
        self._sections = _SECTIONS if files is None else (*_SECTIONS, "files")
        self._digests = {name: xxhash.xxh3_128() for name in self._sections}
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_writable(self.path)
        with _told(self.path):
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
        """Pieces of documents in their order; one without any token does not become a document. Raises PlanError."""
        for piece in pieces:
            whole = with_end(piece, self.tokenization)
            self._tokens_open += len(piece.ids)
            self._words_open += piece.num_words
            if self._tokens_open:
                self._write("ids", whole.ids, id_dtype(self.tokenization))
                self._write("marks", whole.marks, np.dtype(np.uint8))
                self.num_tokens += len(whole.ids)
                self._largest = max(self._largest, int(whole.ids.max(initial=0)))
                if piece.closes:
                    self._close_document()
            if piece.closes:
                self._words_open = self._tokens_open = 0

    def finish(self, num_bytes: int, made: Mapping[str, str] | None = None) -> Header:
        """The file under its name, on the disk. ``num_bytes``: of the text. ``made``: how samples with labels were
        made. Raises PlanError."""
        if not self.num_documents:
            raise PlanError("the text is empty", where="TEXT", fix="give a text that is not empty")
        for content in (self._more or {}).values():
            self._write("files", np.frombuffer(content, np.uint8), np.dtype(np.uint8))
        header = self._header(num_bytes, made)
        with _told(self.path):
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

    def _header(self, num_bytes: int, made: Mapping[str, str] | None) -> Header:
        how = self.tokenization
        sizes = None if self._more is None else {name: len(content) for name, content in self._more.items()}
        return Header(
            tokens=self.num_tokens,
            documents=self.num_documents,
            words=self.num_words,
            bytes=num_bytes,
            dtype=id_dtype(how).name,  # pyright: ignore[reportArgumentType]
            largest=self._largest,
            tokenization=how.name,
            vocabulary_size=how.vocabulary_size,
            special=dict(how.special),
            content={name: digest.hexdigest() for name, digest in self._digests.items()},
            supervised=None if sizes is None else True,
            files=sizes,
            made=None if made is None else dict(made),
        )

    def _close_document(self) -> None:
        self._write("ends", np.array([self.num_tokens]), np.dtype(np.int64))
        self._write("words", np.array([self._words_open]), np.dtype(np.int64))
        self.num_documents += 1
        self.num_words += self._words_open

    def _write(self, name: str, values: np.ndarray, dtype: np.dtype) -> None:
        content = values.astype(dtype.newbyteorder("<"), copy=False).tobytes()
        self._digests[name].update(content)
        with _told(self.path):
            self._files[name].write(content)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns the system's errors of a failed write into one PlanError."""
    try:
        yield
    except (OSError, ValueError) as error:
        fix = "give a writable file, and free space there"
        told = PlanError(f"cannot write {shorten(path)}: {reason(error)}", where="-o", fix=fix)
        raise error if isinstance(error, PlanError) else told from None


def check_writable(path: Path) -> None:
    """Before any text is read. Raises PlanError."""
    folder = path.parent
    if is_directory(path) or not is_directory(folder) or not os.access(folder, os.W_OK):
        why = "it is a directory" if is_directory(path) else f"{shorten(folder)} is not a writable directory"
        raise PlanError(f"cannot write {shorten(path)}: {why}", where="-o", fix="give a writable file")
