"""The safetensors files of a directory: which tensor lies where, checked before any value is read.

    model.safetensors                                    one file, or
    model.safetensors.index.json + model-…-of-….safetensors     an index and its shards

Only headers are read on opening; values come slice by slice, so that a rank touches no bytes but its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.errors import PlanError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "*.pt", "*.pth", "*.bin")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is; ``dtype`` None for one that this program does not read (quantised)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class SafetensorsFiles:
    """Owns the open files of a directory; to be used in a ``with``.

    ``tensors``: everything that they hold, by name. Raises PlanError, naming file and tensor, for a directory without
    safetensors, files that are missing, cut short or no safetensors, and an index that disagrees with its files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()
        try:
            self._open_all()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles = {}
        self._stack.close()

    def read_into(
        self, target: Tensor, name: str, dim: int = 0, ranges: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Copy ``name``, or its half-open ``ranges`` along ``dim`` one after another, to the start of ``target``.

        Casts to the dtype of ``target``. Raises PlanError where the file cannot be read after all.
        """
        stored = self.tensors[name]
        try:
            if ranges is None:
                target.copy_(self._handles[stored.file].get_tensor(name))
                return
            values, offset = self._handles[stored.file].get_slice(name), 0
            for start, stop in ranges:
                if stop > start:
                    part = values[(*(slice(None),) * dim, slice(start, stop))]
                    target.narrow(dim, offset, stop - start).copy_(part)
                offset += stop - start
        except (OSError, SafetensorError) as error:
            raise PlanError(f"{name} cannot be read: {error}", where=str(stored.file)) from error

    # ---- opening

    def _open_all(self) -> None:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if not self.directory.is_dir():
            raise PlanError(f"no directory {self.directory}", fix="name a directory with model.safetensors")
        if single.is_file():
            self._open(single)
        elif index.is_file():
            self._open_index(index)
        else:
            others = sorted(self.directory.glob("*.safetensors"))
            if len(others) != 1:
                raise _no_weights(self.directory, [path.name for path in others])
            self._open(others[0])

    def _open_index(self, index: Path) -> None:
        places = _weight_map(index)
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            path = self.directory / file
            if not path.is_file():
                raise PlanError(
                    f"the index names {file} for {listed(names)}, but there is no such file",
                    where=str(index),
                    fix="complete the download, or save the model again",
                )
            self._open(path)
            held = {name for name, stored in self.tensors.items() if stored.file == path}
            if absent := [name for name in names if name not in held]:
                raise PlanError(
                    f"the index places {listed(absent)} in {file}, which does not hold {_it(absent)}",
                    where=str(index),
                    fix="complete the download, or save the model again",
                )
        if unlisted := [name for name in self.tensors if name not in places]:
            file = self.tensors[unlisted[0]].file.name
            raise PlanError(
                f"{file} holds {listed(unlisted)}, which the index does not list",
                where=str(index),
                fix="take index and files of one save",
            )

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            self._handles[path] = handle
            for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                values = handle.get_slice(name)
                dtype = DTYPES.get(str(values.get_dtype()))
                self.tensors[name] = StoredTensor(name, path, tuple(values.get_shape()), dtype)
        except (OSError, SafetensorError) as error:
            raise PlanError(
                f"{path.name} is cut short or no safetensors file: {error}",
                where=str(path),
                fix="complete the download, or save the model again",
            ) from error


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names and how many more there are."""
    all_names = list(names)
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more} more" if more > 0 else "")


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{index.name} is cut short or no JSON: {error}", where=str(index)) from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise PlanError(f"{index.name} has no weight_map", where=str(index), fix="save the model again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise PlanError(f"{index.name} places {name} in {file!r}, which is no file name", where=str(index))
    return places


def _no_weights(directory: Path, others: list[str]) -> PlanError:
    if others:
        return PlanError(
            f"several safetensors files ({listed(others)}) without {INDEX}",
            where=str(directory),
            fix="add the index that was saved with them",
        )
    pickled = next((path.name for kind in _PICKLED for path in sorted(directory.glob(kind))), None)
    if pickled:
        return PlanError(
            f"the weights are pickled ({pickled}), not safetensors: parts of them cannot be read",
            where=str(directory),
            fix="convert them once: transformers' from_pretrained(DIR) and then save_pretrained(DIR)",
        )
    return PlanError(
        f"not a model directory: neither {SINGLE} nor {INDEX}",
        where=str(directory),
        fix="name a directory with config.json and safetensors",
    )
