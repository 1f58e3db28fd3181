"""Files become documents: one for each file, line, paragraph or row.

Rows come from JSON lines, parquet files and directories of the library ``datasets``. Files are read in parts, and long
documents are yielded in several: no file is held in memory as a whole. The order of files is deterministic.
"""

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from passes.errors import PlanError, first_line, imported
from planner.files.text import MIB, is_directory, is_file, opened, shorten
from runtime.data.tokens import TextPart

PART_BYTES = MIB
_MARK = b"\xef\xbb\xbf"  # the byte order mark, which is not text
MOST_LINE_BYTES = 64 * MIB
_BATCH = 1000  # rows of a table that are read at a time
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_FIX = "write one JSON object a line, or give a parquet file or a directory of the library `datasets`"
STDLIB = "stdlib"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


class Split(StrEnum):
    """The end of a document in a text."""

    file = "file"
    line = "line"
    blank_line = "blank-line"
    json = "json"


def parts(
    files: Iterable[Path],
    split: Split = Split.file,
    field: str = "text",
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    of_datasets: str | None = None,
) -> Iterator[TextPart]:
    """Yield the documents of ``files`` in order; documents of white space alone are left out.

    ``field``: the field of a row that holds its text. ``of_datasets``: the split of a directory of ``datasets``.
    ``on_bytes`` is called with the count of bytes of each read. Raises PlanError for a file that cannot be read.
    """
    if split is Split.json:
        for row in rows_of(files, of_datasets, on_bytes):
            with row as fields:  # adds the place to the PlanError for a row without the field
                content = text_of(fields, field).encode()
            if content.strip():
                yield TextPart(content, True, row.path, row=row.where)
        return
    for path in files:
        with opened(path) as file:
            yield from _SPLITS[split](_Counted(file, path, on_bytes), path)


class _Counted:
    """A file that reports the bytes read from it. Owns the position of the next byte and the number of the line."""

    def __init__(self, file: BinaryIO, path: Path, on_bytes: Callable[[int], None]) -> None:
        self.file, self.path, self.on_bytes, self.line = file, path, on_bytes, 0
        self.place = len(_MARK) if file.read(len(_MARK)) == _MARK else 0
        file.seek(self.place)

    def part(self) -> bytes:
        return self._counted(self.file.read(PART_BYTES))

    def lines(self) -> Iterator[bytes]:
        while line := self._counted(self.file.readline(MOST_LINE_BYTES + 1)):
            self.line += 1
            if len(line) > MOST_LINE_BYTES:
                what = f"a line is longer than {MOST_LINE_BYTES // MIB} MiB"
                raise PlanError(what, where=self.where, fix="split it into several")
            yield line

    @property
    def where(self) -> str:
        return f"{shorten(self.path)}:{self.line}"

    def _counted(self, content: bytes) -> bytes:
        self.place += len(content)
        self.on_bytes(len(content))
        return content


def _by_file(file: _Counted, path: Path) -> Iterator[TextPart]:
    content, begin = file.part(), file.place
    begin -= len(content)
    while content:
        following = file.part()
        yield TextPart(content, not following, path, begin)
        begin += len(content)
        content = following


def _by_line(file: _Counted, path: Path) -> Iterator[TextPart]:
    for line in file.lines():
        if line.strip():
            yield TextPart(line.rstrip(b"\r\n"), True, path, file.place - len(line))


def _by_blank_line(file: _Counted, path: Path) -> Iterator[TextPart]:
    lines: list[bytes] = []
    begin = num_bytes = 0
    for line in file.lines():
        if line.strip():
            if num_bytes >= PART_BYTES:  # only this line shows that the document continues
                yield TextPart(b"".join(lines), False, path, begin)
                lines, num_bytes = [], 0
            begin = begin if lines else file.place - len(line)
            lines.append(line)
            num_bytes += len(line)
        elif lines:
            yield TextPart(b"".join(lines), True, path, begin)
            lines, num_bytes = [], 0
    if lines:
        yield TextPart(b"".join(lines), True, path, begin)


_SPLITS = {Split.file: _by_file, Split.line: _by_line, Split.blank_line: _by_blank_line}


class Row(NamedTuple):
    """A row. ``value``: its fields, or the error of reading it. ``path``, ``where``: for errors. ``number``: from 0.

    ``with row as fields`` raises PlanError for a row that cannot be read, and adds its place to errors of the block.
    """

    value: dict[str, Any] | PlanError
    path: Path
    where: str
    number: int

    def __enter__(self) -> dict[str, Any]:
        if isinstance(self.value, PlanError):
            raise self._placed(self.value)
        return self.value

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RecursionError):
            raise RowError("a row is nested too deeply", where=self.where, fix="flatten its objects") from None
        if isinstance(error, PlanError) and not error.where:
            raise self._placed(error) from None

    def _placed(self, error: PlanError) -> PlanError:
        return error if error.where else type(error)(error.what, where=self.where, fix=error.fix)


class RowError(PlanError):
    """The error for a row that cannot be used; ``--bad-rows drop`` leaves such rows out."""


def text_of(row: dict[str, Any], field: str) -> str:
    """Return the text in a field of a row. Raises RowError if the row has no such text."""
    if not isinstance(text := row.get(field), str):
        raise RowError(f"the row has no text {field!r} (there is: {names_in(row)})", fix="name a field that holds text")
    return text


def names_in(row: dict[str, Any]) -> str:
    return shorten(", ".join(map(str, list(row)[:8])), 200)


def sources_of(texts: Iterable[str]) -> list[Path]:
    """Return all files of ``texts``; a directory of ``datasets`` counts as one. Raises PlanError if one is missing."""
    return [path for text in texts for path in ([Path(text)] if _is_dataset(Path(text)) else files_of(text, "TEXT"))]


def rows_of(paths: Iterable[Path], split: str | None, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    """Yield all rows. ``split``: the split to read of a directory of ``datasets``.

    Raises PlanError for a file that cannot be read; an unreadable row is yielded with its error.
    """
    for path in paths:
        if _is_dataset(path):
            yield from _of_table(_dataset(path, split), path, on_bytes)
        elif path.suffix == ".parquet":
            yield from _of_table(_parquet(path), path, on_bytes)
        else:
            yield from _of_lines(path, on_bytes)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files of a directory, in bytes."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if is_directory(path) else path.stat().st_size


def _is_dataset(path: Path) -> bool:
    return any(is_file(path / name) for name in _OF_DATASETS)


def _of_lines(path: Path, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    with opened(path) as content:
        file = _Counted(content, path, on_bytes)
        for number, line in enumerate(filter(bytes.strip, file.lines())):
            yield Row(_parsed(line), path, file.where, number)


def _parsed(line: bytes) -> dict[str, Any] | PlanError:
    try:
        value = json.loads(line.removeprefix(_MARK).decode())  # concatenated files have the mark inside
        if b"\\u" in line:  # raises for half a surrogate pair, which is not text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return RowError(f"a row cannot be read: {shorten(error)}", fix=_FIX)
    return value if isinstance(value, dict) else RowError(f"a row is a {type(value).__name__}, not an object", fix=_FIX)


def _of_table(tables: Iterator[list[dict[str, Any]]], path: Path, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    number, size = 0, size_of(path)
    while True:
        try:
            rows = next(tables, None)
        except (KeyboardInterrupt, PlanError):
            raise
        except Exception as error:
            what = f"{shorten(path)} cannot be read: {shorten(first_line(error))}"
            raise PlanError(what, where=f"{shorten(path)}, row {number}", fix="write the file again") from None
        if rows is None:
            return on_bytes(size)
        for value in rows:
            yield Row(_without_nulls(value), path, f"{shorten(path)}, row {number}", number)
            number += 1


def _without_nulls(value: Any) -> Any:
    """Return a value without None: tables give each struct the fields of all others, with None."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parquet(path: Path) -> Iterator[list[dict[str, Any]]]:
    with _reader("pyarrow.parquet", path).ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH):
            yield batch.to_pylist()


def _dataset(path: Path, split: str | None) -> Iterator[list[dict[str, Any]]]:
    table = _reader("datasets", path).load_from_disk(str(path))
    if isinstance(table, dict):
        if split is None and len(table) == 1:
            split = next(iter(table))
        if split not in table:
            what = f"{shorten(path)} has the splits {', '.join(map(str, table))}"
            raise PlanError(what, where="--split", fix="name one of them with --split")
        table = table[split]
    for begin in range(0, len(table), _BATCH):
        yield [dict(row) for row in table.select(range(begin, min(begin + _BATCH, len(table))))]


def _reader(module: str, path: Path) -> Any:
    what, fix = f"reading {shorten(path)}", "pip install 'meshwright[data]', or write JSON lines"
    return imported(module, what, where=shorten(path), fix=fix)


def files_of(source: str, option: str = "--data") -> list[Path]:
    """Return a file, the sorted files of a directory, or of Python's library (``stdlib``). Raises PlanError."""
    if source == STDLIB:
        library = Path(sysconfig.get_path("stdlib"))
        files = library.rglob("*.py")
        return sorted(file for file in files if not _LEFT_OUT.intersection(file.relative_to(library).parts))
    path = Path(source)
    if is_file(path):
        return [path]
    if is_directory(path):
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    raise PlanError(
        f"no file or directory {shorten(source)}", where=option, fix="give a text file or directory, or stdlib"
    )
