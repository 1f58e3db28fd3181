"""The rows of JSON lines, parquet files and directories of the library ``datasets``, one after another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from passes.errors import PlanError, first_line
from planner.files.text import MIB, cannot_read, is_directory, is_file, open_regular, shorten
from runtime.data.text.pieces import Part
from runtime.data.text.sources import files_of

MOST_LINE_BYTES = 64 * MIB
_BATCH = 1000  # rows of a table at once
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_FIX = "write one JSON object a line, or give a parquet file or a directory of the library `datasets`"


@dataclass(frozen=True, slots=True)
class Row:
    """``value``: its fields, or why it cannot be read. ``path``, ``where``: for errors. ``number``: from 0."""

    value: dict[str, Any] | PlanError
    path: Path
    where: str
    number: int

    @contextmanager
    def fields(self) -> Iterator[dict[str, Any]]:
        """Raises PlanError for a row that cannot be read; errors of the block get its place."""
        try:
            if isinstance(self.value, PlanError):
                raise self.value
            yield self.value
        except RecursionError:
            raise RowError("a row is nested too deeply", where=self.where, fix="flatten its objects") from None
        except PlanError as error:
            raise error if error.where else type(error)(error.what, where=self.where, fix=error.fix) from None


class RowError(PlanError):
    """A row that cannot be used without a change."""


def text_of(row: dict[str, Any], field: str) -> str:
    """Raises RowError if the row has no such text."""
    if not isinstance(text := row.get(field), str):
        raise RowError(f"the row has no text {field!r} (there is: {names_in(row)})", fix="name a field that holds text")
    return text


def names_in(row: dict[str, Any]) -> str:
    return shorten(", ".join(map(str, list(row)[:8])), 200)


def documents_of(rows: Iterable[Row], field: str) -> Iterator[Part]:
    """The text ``field`` of each row; white space alone is left out. Raises PlanError for a row without one."""
    for row in rows:
        with row.fields() as fields:
            content = text_of(fields, field).encode()
        if content.strip():
            yield Part(content, True, row.path, row=row.where)


def sources_of(texts: Iterable[str]) -> list[Path]:
    """Each file, and each directory of ``datasets`` as a whole. Raises PlanError if there is none of the name."""
    return [path for text in texts for path in ([Path(text)] if _is_dataset(Path(text)) else files_of(text, "TEXT"))]


def rows_of(paths: Iterable[Path], split: str | None, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    """All rows. Raises PlanError for a file that cannot be read further; ``split``: of directories with several."""
    for path in paths:
        if _is_dataset(path):
            yield from _of_table(_dataset(path, split), path, on_bytes)
        elif path.suffix == ".parquet":
            yield from _of_table(_parquet(path), path, on_bytes)
        else:
            yield from _of_lines(path, on_bytes)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a directory."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if is_directory(path) else path.stat().st_size


def _is_dataset(path: Path) -> bool:
    return any(is_file(path / name) for name in _OF_DATASETS)


def _of_lines(path: Path, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            line_number = number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                on_bytes(len(line))
                line_number += 1
                where = f"{shorten(path)}:{line_number}"
                if len(line) > MOST_LINE_BYTES:
                    what = f"a line is longer than {MOST_LINE_BYTES // MIB} MiB"
                    raise PlanError(what, where=where, fix="split the row")
                if line.strip():
                    yield Row(_parsed(line), path, where, number)
                    number += 1
    except (OSError, ValueError) as error:
        raise error if isinstance(error, PlanError) else cannot_read(path, error) from None


def _parsed(line: bytes) -> dict[str, Any] | PlanError:
    try:
        value = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:  # half a surrogate pair is no text
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
    """Tables give each struct the fields of all others, with None."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parquet(path: Path) -> Iterator[list[dict[str, Any]]]:
    try:
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _needs("pyarrow", path) from None
    with ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH):
            yield batch.to_pylist()


def _dataset(path: Path, split: str | None) -> Iterator[list[dict[str, Any]]]:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _needs("datasets", path) from None
    found = load_from_disk(str(path))
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            what = f"{shorten(path)} has the splits {', '.join(map(str, found))}"
            raise PlanError(what, where="--split", fix="name one of them with --split")
        found = found[split]
    for begin in range(0, len(found), _BATCH):
        yield [dict(row) for row in found.select(range(begin, min(begin + _BATCH, len(found))))]


def _needs(package: str, path: Path) -> PlanError:
    what = f"reading {shorten(path)} needs the package {package}, which is not installed"
    return PlanError(what, where=shorten(path), fix="pip install 'meshwright[data]', or write JSON lines")
