"""Files become documents: each file one, or each line, each paragraph, or a field of each line's JSON object.

A document longer than a part comes in several: nothing here holds a whole file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from passes.errors import PlanError
from planner.files.text import MIB, cannot_read, open_regular, shorten
from runtime.data.text.pieces import Part

PART_BYTES = MIB
MOST_LINE_BYTES = 64 * MIB
_MARK = b"\xef\xbb\xbf"  # of byte order; no text


class Split(StrEnum):
    """The end of a document in a text."""

    file = "file"
    line = "line"
    blank_line = "blank-line"
    json = "json"


def parts(
    files: Iterable[Path], split: Split, field: str, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Part]:
    """All documents of ``files`` in their order; those of white space alone are left out.

    ``on_bytes`` is called with the count of bytes of each read. Raises PlanError for a file that cannot be read.
    """
    for path in files:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                yield from _SPLITS[split](_Told(file, on_bytes), path, field)
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


def _by_file(file: _Told, path: Path, field: str) -> Iterator[Part]:
    content, begin = file.part(), file.place
    begin -= len(content)
    while content:
        following = file.part()
        yield Part(content, not following, path, begin)
        begin += len(content)
        content = following


def _by_line(file: _Told, path: Path, field: str) -> Iterator[Part]:
    for line in file.lines():
        if line.strip():
            yield Part(line.rstrip(b"\r\n"), True, path, file.place - len(line))


def _by_blank_line(file: _Told, path: Path, field: str) -> Iterator[Part]:
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


def _by_json(file: _Told, path: Path, field: str) -> Iterator[Part]:
    for number, line in enumerate(file.lines(), 1):
        if line.strip():
            text = _field_of(line, f"{shorten(path)}:{number}", field)
            if text.strip():
                yield Part(text, True, path, line=number)


def _field_of(line: bytes, where: str, field: str) -> bytes:
    fix = "write one JSON object per line, and name its text field with --field"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"a line of JSON cannot be read: {error}", where=where, fix=fix) from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        named = ", ".join(map(str, list(value)[:8])) if isinstance(value, dict) else f"it is a {type(value).__name__}"
        raise PlanError(f"a line of JSON has no text {field!r} (there is: {shorten(named)})", where=where, fix=fix)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"a line of JSON has an invalid character: {error}", where=where, fix=fix) from None


_SPLITS = {Split.file: _by_file, Split.line: _by_line, Split.blank_line: _by_blank_line, Split.json: _by_json}
