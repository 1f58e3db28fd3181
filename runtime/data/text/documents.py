"""Files become documents: each file one, or each line, each paragraph, or a field of each line's JSON object.

A document longer than a part comes in several: nothing here holds a whole file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from passes.errors import PlanError
from planner.files.text import MIB, cannot_read, open_regular, shorten
from runtime.data.text.pieces import Part
from runtime.data.text.rows import MOST_LINE_BYTES, documents_of, rows_of

PART_BYTES = MIB
_MARK = b"\xef\xbb\xbf"  # of byte order; no text


class Split(StrEnum):
    """The end of a document in a text."""

    file = "file"
    line = "line"
    blank_line = "blank-line"
    json = "json"


def parts(
    files: Iterable[Path],
    split: Split,
    field: str = "text",
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    of_datasets: str | None = None,
) -> Iterator[Part]:
    """All documents of ``files`` in their order; those of white space alone are left out. ``field``, ``of_datasets``
    (the split of a directory of ``datasets``): of rows.

    ``on_bytes`` is called with the count of bytes of each read. Raises PlanError for a file that cannot be read.
    """
    if split is Split.json:
        yield from documents_of(rows_of(files, of_datasets, on_bytes), field)
        return
    for path in files:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                yield from _SPLITS[split](_Told(file, on_bytes), path)
        except (OSError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise cannot_read(path, error) from None


class _Told:
    """A file that reports the bytes read from it. Owns the position of the next byte."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self.file, self.on_bytes = file, on_bytes
        self.place = len(_MARK) if file.read(len(_MARK)) == _MARK else 0
        file.seek(self.place)

    def part(self) -> bytes:
        return self._told(self.file.read(PART_BYTES))

    def lines(self) -> Iterator[bytes]:
        while line := self._told(self.file.readline(MOST_LINE_BYTES + 1)):
            if len(line) > MOST_LINE_BYTES:
                what = f"a line of {shorten(self.file.name)} is longer than {MOST_LINE_BYTES // MIB} MiB"
                raise PlanError(what, where=f"byte {self.place - len(line)}", fix="split the text into lines")
            yield line

    def _told(self, content: bytes) -> bytes:
        self.place += len(content)
        self.on_bytes(len(content))
        return content


def _by_file(file: _Told, path: Path) -> Iterator[Part]:
    content, begin = file.part(), file.place
    begin -= len(content)
    while content:
        following = file.part()
        yield Part(content, not following, path, begin)
        begin += len(content)
        content = following


def _by_line(file: _Told, path: Path) -> Iterator[Part]:
    for line in file.lines():
        if line.strip():
            yield Part(line.rstrip(b"\r\n"), True, path, file.place - len(line))


def _by_blank_line(file: _Told, path: Path) -> Iterator[Part]:
    held: list[bytes] = []
    begin = num_bytes = 0
    for line in file.lines():
        if line.strip():
            if num_bytes >= PART_BYTES:  # only now is it known that the document continues
                yield Part(b"".join(held), False, path, begin)
                held, num_bytes = [], 0
            begin = begin if held else file.place - len(line)
            held.append(line)
            num_bytes += len(line)
        elif held:
            yield Part(b"".join(held), True, path, begin)
            held, num_bytes = [], 0
    if held:
        yield Part(b"".join(held), True, path, begin)


_SPLITS = {Split.file: _by_file, Split.line: _by_line, Split.blank_line: _by_blank_line}
