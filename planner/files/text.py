"""Reads text and JSON files that a user named: regular files in UTF-8, up to a maximum size.

A pipe is an error, because every process of a run reads the file; so is a device, which may never end.

JSON must have unique keys. Besides invalid JSON, these are errors: integers beyond 64 bits, NaN and infinity, and lone
surrogates. Python's parser limits the depth.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from passes.errors import PlanError, Where

KIB, MIB = 1 << 10, 1 << 20
OPEN_FILES_FIX = "raise it in the shell that starts the run: `ulimit -n 1024`, or LimitNOFILE of its service"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
LARGEST = 2**63 - 1
is_file, is_directory = os.path.isfile, os.path.isdir  # unlike Path's: False for a name that no file can have
_HALF_A_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(
    path: str | PathLike[str],
    what: str,
    *,
    most_bytes: int,
    error: type[PlanError] = PlanError,
    fix: str = "",
) -> str:
    """Return the text of the file at ``path``, without a byte order mark. ``what``: the kind of file, for errors.

    Raises ``error`` if the file does not exist, is not a regular file, is larger than ``most_bytes``, cannot be read,
    or is not UTF-8.
    """
    content = read_bytes(path, what, most_bytes=most_bytes, error=error, fix=fix)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        raise _not_utf8(error, path, what, content.count(b"\n", 0, failed.start) + 1) from None


def _not_utf8(error: type[PlanError], path: str | PathLike[str], what: str, line: int) -> PlanError:
    where = Where(file=shorten(path), line=line)
    return error(f"the {what} is not UTF-8 text", where=where, fix="save the file as UTF-8")


def read_bytes(
    path: str | PathLike[str],
    what: str,
    *,
    most_bytes: int,
    error: type[PlanError] = PlanError,
    fix: str = "",
) -> bytes:
    """Return the content of the file at ``path``. Raises as ``read_text`` does."""
    shown = shorten(path)
    try:
        content = _content(path, most_bytes)
    except FileNotFoundError:
        raise error(f"there is no {what} file {shown}", where=shown, fix=fix) from None
    except _NoFile as kind:
        raise error(f"the {what} {shown} is {kind}", where=shown, fix=fix) from None
    except (OSError, ValueError) as failed:  # ValueError: a name that no file can have
        raise error(f"cannot read the {what} {shown}: {reason(failed)}", where=shown, fix=fix) from None
    if content is None:
        size = f"{most_bytes // MIB} MiB" if most_bytes >= MIB else f"{most_bytes // KIB} KiB"
        raise error(f"the {what} {shown} is larger than {size}", where=shown, fix=f"use a smaller {what}")
    return content


def lines_of(path: str | PathLike[str], what: str, *, most_bytes: int, fix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it ends with a newline) for each line of the file at ``path``; holds one line in memory.

    ``most_bytes``: limit for one line. Raises PlanError as ``read_text`` does.
    """
    if not is_file(Path(path)):
        read_text(path, what, most_bytes=0, fix=fix)  # raises the error
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            number = 0
            while content := file.readline(most_bytes + 1):
                number += 1
                if len(content) > most_bytes:
                    words = f"a line of the {what} is longer than {most_bytes // KIB} KiB"
                    raise PlanError(words, where=Where(file=shorten(path), line=number), fix=fix)
                try:
                    yield content.decode("utf-8-sig" if number == 1 else "utf-8"), content.endswith(b"\n")
                except UnicodeDecodeError:
                    raise _not_utf8(PlanError, path, what, number) from None
    except OSError as failed:
        words = f"cannot read the {what} {shorten(path)}: {reason(failed)}"
        raise PlanError(words, where=shorten(path), fix=fix) from None


@contextmanager
def opened(path: Path, fix: str = "give a readable file", *, follows: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a link only if ``follows``. Raises PlanError, with the file's name, for any
    other kind of file, and if reading fails within the block.
    """
    try:
        with os.fdopen(open_regular(path, follows=follows), "rb") as file:
            yield file
    except PlanError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        raise cannot_read(path, error, fix) from None


def open_regular(path: str | PathLike[str], *, follows: bool = True) -> int:
    """Return a descriptor for reading a regular file; never waits for a pipe or device.

    Raises OSError, for any other kind of file too; ValueError for a name that no file can have.
    """
    of_links = 0 if follows else getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | of_links)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise _NoFile(next((name for is_kind, name in _KINDS if is_kind(mode)), "something else") + ", not a regular file")


def reason(error: Exception) -> str:
    """Return the operating system's message for why a file could not be read."""
    if isinstance(error, UnicodeError):
        return "its name is not UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@contextmanager
def writing(what: str, where: str | Where, fix: str = "give a writable file") -> Iterator[None]:
    """Convert an error of the operating system while ``what`` is written to PlanError."""
    try:
        yield
    except PlanError:
        raise
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot write {what}: {reason(error)}", where=where, fix=fix) from error


def check_file(path: Path, option: str) -> None:
    """Raise PlanError unless a file of this name can be written."""
    folder = path.parent
    if is_directory(path) or not is_directory(folder) or not os.access(folder, os.W_OK):
        why = "it is a directory" if is_directory(path) else f"{shorten(folder)} is not a writable directory"
        raise PlanError(f"cannot write {shorten(path)}: {why}", where=option, fix="give a writable file")


def cannot_read(path: Path, error: Exception, fix: str = "give a readable file") -> PlanError:
    return PlanError(f"cannot read {shorten(path.name or path)}: {reason(error)}", where=shorten(path), fix=fix)


def shorten(text: object, most: int = 300) -> str:
    """Return ``text`` for an error message; if longer than ``most``, only its beginning and end."""
    text = str(text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-most // 3 :]}"


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, which could move the cursor of a terminal or change colours."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class _NoFile(OSError):
    """Raised for a name that is not a regular file."""


def _content(path: str | PathLike[str], most: int) -> bytes | None:
    """Return the content of a file; None if it has more than ``most`` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    return content if content is not None and len(content) <= most else None


def read_json(
    path: str | PathLike[str], what: str, *, most_bytes: int = 16 * MIB, fix: str = "", damaged: str = ""
) -> Any:
    """Return the value of the JSON file at ``path``. ``what``: the kind of file, for errors.

    Raises PlanError as ``read_text`` does, and for invalid content with the fix ``damaged``.
    """
    text = read_text(path, what, most_bytes=most_bytes, fix=fix)
    try:
        return parse_json(text)
    except ValueError as error:
        words = f"the {what} is damaged or truncated: {error}"
        raise PlanError(words, where=shorten(path), fix=damaged or fix) from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with the reason."""
    try:
        value = json.loads(
            text,
            parse_int=parse_integer,
            parse_float=_finite,
            parse_constant=refuse_constant,
            object_pairs_hook=_object,
        )
        if _HALF_A_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string contains a lone surrogate (half a character)") from None
    return value


def parse_integer(digits: str) -> int:
    """Return the integer. Raises ValueError if it needs more than 64 bits."""
    if len(digits) > 20 or not -LARGEST - 1 <= (value := int(digits)) <= LARGEST:
        raise ValueError(f"the number {shorten(digits, 40)} is too large")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shorten(digits, 40)} is too large")
    return value


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        earlier: set[str] = set()
        twice = next(name for name, _ in pairs if name in earlier or earlier.add(name))
        raise ValueError(f"the key {shorten(twice, 100)!r} is given twice")
    return values
