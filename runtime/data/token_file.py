"""The token file format: read by memory mapping, so that a text may be far larger than memory.

    0      magic [8] · version u32 · bytes of the header u32 · xxh3 of the header u64 · header (JSON)
    4096   ids · marks u8 · ends i64 · words i64        little endian, each aligned to 64 bytes
           · files u8                                   version 2: samples with labels, and the tokenizer's files

The header determines the size of the file: a truncated or extended file is rejected when it is opened.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from passes.errors import PlanError
from planner.files.text import MIB, cannot_read, opened, parse_json, shorten
from runtime.data.tokens import PAIRS, Tokenization, Tokens

MAGIC = b"\x93MWTOKEN"
VERSION = 2  # samples with labels; texts are written as version 1
BEGIN, _ALIGNED = 4096, 64
_PRELUDE = struct.Struct("<8sIIQ")
MOST_HEADER_BYTES = BEGIN - _PRELUDE.size
_FIX = "write it again with `meshwright prepare TEXT -o FILE`"
_SCANNED = 4 * MIB  # elements that are read at a time

_Count = Annotated[int, Field(strict=True, ge=0, le=1 << 48)]
_Id = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
_Name = Annotated[str, Field(pattern=r"^(additional_chat_templates/)?[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]


class Header(BaseModel):
    """The header. ``bytes``: size of the text. ``largest``: largest id. ``content``: section -> xxh3_128 of its bytes.

    Version 2 adds ``supervised``, ``files`` (name -> bytes) and ``made`` (the options that shaped the samples).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[_Count, Field(ge=1)]
    documents: Annotated[_Count, Field(ge=1)]
    words: _Count
    bytes: _Count
    dtype: Literal["uint8", "uint16", "uint32"]
    largest: _Id | None = None
    tokenization: str
    vocabulary_size: Annotated[_Id, Field(ge=1)]
    special: dict[str, _Id]
    content: dict[str, str]
    supervised: Literal[True] | None = None
    files: dict[_Name, _Count] | None = None
    made: dict[str, str] | None = None

    @property
    def version(self) -> int:
        return VERSION if self.supervised else 1

    @property
    def is_paired(self) -> bool:
        return PAIRS in (self.made or {})

    @property
    def text(self) -> str:
        """The header as JSON; version 1 omits the newer fields."""
        return self.model_dump_json(exclude=None if self.supervised else {"supervised", "files", "made"})

    def sections(self) -> Iterator[tuple[str, np.dtype, int, int]]:
        """Yield name, dtype, number of elements and first byte of each section."""
        place = BEGIN
        kinds = {"ids": self.dtype, "marks": "uint8", "ends": "int64", "words": "int64"}
        counts = {"ids": self.tokens, "marks": self.tokens}
        if self.files is not None:
            kinds["files"], counts["files"] = "uint8", sum(self.files.values())
        for name, kind in kinds.items():
            dtype = np.dtype(kind).newbyteorder("<")
            count = counts.get(name, self.documents)
            yield name, dtype, count, place
            place += -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED

    @property
    def num_bytes(self) -> int:
        """Size of the whole file in bytes."""
        _, dtype, count, place = list(self.sections())[-1]
        return place + -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED

    @property
    def identity(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.model_copy(update={"made": None}).text.encode())

    def packed(self) -> bytes:
        """Return the first ``BEGIN`` bytes of the file. Raises PlanError if the header does not fit into them."""
        text = self.text.encode()
        if len(text) > MOST_HEADER_BYTES:
            raise PlanError(
                "the names of the tokenizer's special tokens are too long", where="--tokenizer", fix="shorten them"
            )
        return (_PRELUDE.pack(MAGIC, self.version, len(text), xxhash.xxh3_64_intdigest(text)) + text).ljust(
            BEGIN, b"\0"
        )


def is_token_file(path: Path) -> bool:
    """Return whether the file begins with the magic number, or is a truncated part of it."""
    with suppress(PlanError), opened(path) as file:
        begin = file.read(len(MAGIC))
        return bool(begin) and MAGIC.startswith(begin)
    return False


def read_header(path: Path) -> Header:
    """Return the header. Raises PlanError if it is damaged or does not match the size of the file."""
    with opened(path) as file:
        begin, size = file.read(BEGIN), os.fstat(file.fileno()).st_size
    if not begin.startswith(MAGIC) and not (begin and MAGIC.startswith(begin)):
        raise _bad(path, "is not a token file")
    if len(begin) < BEGIN:
        raise _bad(path, f"is truncated: it has {size} bytes, its header alone takes {BEGIN}")
    _, version, length, digest = _PRELUDE.unpack_from(begin)
    if version > VERSION:
        fix = "install a newer meshwright, or write the file again with this one"
        raise _bad(path, f"is of version {version}; this meshwright reads up to {VERSION}", fix)
    text = begin[_PRELUDE.size : _PRELUDE.size + length]
    if version < 1 or length > MOST_HEADER_BYTES or xxhash.xxh3_64_intdigest(text) != digest:
        raise _bad(path, "is damaged: the checksum of its header does not match")
    header = _parsed(path, text)
    if header.version != version:
        raise _bad(path, "is damaged: its header is of another version")
    if size != header.num_bytes:
        how = "is truncated" if size < header.num_bytes else "is damaged"
        raise _bad(path, f"{how}: it has {size} bytes, {header.num_bytes} are expected")
    return header


def open_token_file(path: Path, source: str) -> Tokens:
    """Return the tokens of a file, memory-mapped.

    Raises PlanError for a damaged header or damaged ends of documents; ``check_content`` also reads the tokens.
    """
    header = read_header(path)
    try:
        whole = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    arrays = {name: whole[at : at + n * dtype.itemsize].view(dtype) for name, dtype, n, at in header.sections()}
    _check_ends(path, header, arrays["ends"])
    arrays.pop("files", None)
    how = Tokenization(header.tokenization, header.vocabulary_size, header.special)
    more = {"identity": header.identity, "largest": header.largest, "is_supervised": bool(header.supervised)}
    return Tokens(**arrays, tokenization=how, source=source, is_paired=header.is_paired, **more)


def files_in(path: Path) -> dict[str, bytes]:
    """Return the tokenizer's files in a token file by name; none for texts. Raises PlanError."""
    header = read_header(path)
    *_, (_, _, _, begin) = header.sections()
    with path.open("rb") as file:
        file.seek(begin)
        return {name: file.read(size) for name, size in (header.files or {}).items()}


def check_content(path: Path) -> None:
    """Raise PlanError if the checksum of a section does not match. Reads the whole file."""
    header = read_header(path)
    whole = np.memmap(path, np.uint8, "r")
    for name, dtype, count, begin in header.sections():
        digest = xxhash.xxh3_128()
        end = begin + count * dtype.itemsize
        for at in range(begin, end, _SCANNED):
            digest.update(whole[at : min(at + _SCANNED, end)].data)
        if digest.hexdigest() != header.content.get(name):
            raise _bad(path, f"is damaged: the checksum of its {name} does not match")


def _parsed(path: Path, text: bytes) -> Header:
    try:
        header = Header.model_validate(parse_json(text.decode()))
    except (ValueError, ValidationError):
        raise _bad(path, "is damaged: its header cannot be read") from None
    largest = max([*header.special.values(), header.largest or 0])
    if largest >= header.vocabulary_size or header.vocabulary_size - 1 > np.iinfo(header.dtype).max:
        raise _bad(path, "is damaged: its ids exceed its own vocabulary")
    return header


def _check_ends(path: Path, header: Header, ends: np.ndarray) -> None:
    before = 0
    for at in range(0, len(ends), _SCANNED):
        part = ends[at : at + _SCANNED]
        if part[0] <= before or (np.diff(part) <= 0).any():
            raise _bad(path, "is damaged: the ends of its documents are not in ascending order")
        before = int(part[-1])
    if before != header.tokens:
        raise _bad(path, f"is damaged: its last document ends at {before}, not at {header.tokens}")


def _bad(path: Path, what: str, fix: str = _FIX) -> PlanError:
    return PlanError(f"{shorten(path)} {what}", where=shorten(path), fix=fix)
