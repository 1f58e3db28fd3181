"""The safetensors files of a directory: headers are checked before any value is read.

    model.safetensors                                    one file, or
    model.safetensors.index.json + model-…-of-….safetensors     an index and its shards

Opening reads only headers; values are read slice by slice, so that a rank reads only its own bytes.

Directories are untrusted: only regular files are opened, and headers have a limit. A FIFO would block forever, a device
never ends, and a link may lead out of the directory.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.assembly import Source
from planner.files.text import is_directory, opened, read_json, shorten
from planner.progress import see_one
from planner.sharding.boxes import Box

OTHER_SAVE = "load another save"
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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
MOST_HEADER = 32 << 20  # bytes, enough for some 250,000 tensors
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "*.pt", "*.pth", "*.bin")
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file, shape and dtype of a tensor."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class OpenFiles:
    """Open safetensors files, for use in a ``with``. If one cannot be opened, the others are closed.

    ``fix``: of the error for a tensor that cannot be read.
    """

    fix = "provide an undamaged copy of the file"

    def __init__(self) -> None:
        self._stack, self._handles = ExitStack(), dict[Any, Any]()
        try:
            self._open_all()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles = {}
        self._stack.close()

    def _open_all(self) -> None:
        raise NotImplementedError

    def _tensors_in(self, path: Path) -> Iterator[StoredTensor]:
        """Open a file and yield its tensors. Raises OSError, SafetensorError, and PlanError for an unknown dtype."""
        handle = self._handles[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
        for name in handle.keys():  # noqa: SIM118 - a handle is not a mapping
            values = handle.get_slice(name)
            dtype = DTYPES.get(code := str(values.get_dtype()))
            if dtype is None:
                what = f"{shorten(name)} in {path.name} is stored as {code}, which is not read"
                raise PlanError(what, where=str(path), fix="load the directory of the model that was quantised")
            yield StoredTensor(name, path, tuple(values.get_shape()), dtype)

    def read_stored(self, stored: StoredTensor, box: Box, target: Tensor) -> None:
        """Copy ``box`` of a tensor in its file to ``target``, which has the box's shape; cast to the target's dtype.

        Raises PlanError if the file cannot be read.
        """
        name = stored.name
        try:
            if box.shape == stored.shape:
                target.copy_(self._handles[stored.file].get_tensor(name))
            else:
                values = self._handles[stored.file].get_slice(name)
                target.copy_(values[box.slices])
        except (OSError, SafetensorError) as error:
            raise PlanError(f"{name} cannot be read: {error}", where=str(stored.file), fix=self.fix) from error
        see_one("parts", box.num_elements * target.element_size())


class SafetensorsFiles(OpenFiles):
    """The open files of a directory. ``tensors``: all tensors by name. ``unread``: other weight files beside them.

    Raises PlanError, naming file and tensor, for a directory without safetensors, files that are missing, truncated or
    not safetensors, and an index that disagrees with its files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        super().__init__()

    def source(self, name: str) -> Source:
        return Source(name, self.tensors[name].shape)

    def read(self, name: str, box: Box, target: Tensor) -> None:
        """Copy ``box`` of a tensor to ``target``, as ``read_stored`` does."""
        self.read_stored(self.tensors[name], box, target)

    # ---- opening

    def _open_all(self) -> None:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if not is_directory(self.directory):
            raise PlanError(f"no directory {shorten(self.directory)}", fix="give a directory with model.safetensors")
        if os.path.lexists(single):
            self._open(single)
        elif os.path.lexists(index):
            self._open_index(index)
        else:
            others = sorted(self.directory.glob("*.safetensors"))
            if len(others) != 1:
                raise _no_weights(self.directory, [path.name for path in others])
            self._open(others[0])
        self.unread = [p.name for p in sorted(self.directory.glob("*.safetensors")) if p not in self._handles]

    def _open_index(self, index: Path) -> None:
        places = _weight_map(index)
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            path = self.directory / file
            if not os.path.lexists(path):
                what = f"the index names {shorten(file)} for {listed(names)}, but there is no such file"
                raise PlanError(what, where=str(index), fix="complete the download, or save the model again")
            self._open(path)
            in_file = {name for name, stored in self.tensors.items() if stored.file == path}
            if absent := [name for name in names if name not in in_file]:
                raise PlanError(
                    f"the index places {listed(absent)} in {file}, which does not hold "
                    + ("it" if len(absent) == 1 else "them"),
                    where=str(index),
                    fix="complete the download, or save the model again",
                )
        if unlisted := [name for name in self.tensors if name not in places]:
            file = self.tensors[unlisted[0]].file.name
            what = f"{file} holds {listed(unlisted)}, which the index does not list"
            raise PlanError(what, where=str(index), fix="take the index and the files of one save")

    def _open(self, path: Path) -> None:
        _check_header(path)
        try:
            for stored in self._tensors_in(path):
                if (other := self.tensors.setdefault(stored.name, stored)) is not stored:
                    what = f"{shorten(stored.name)} is stored twice, in {other.file.name} and {path.name}"
                    raise PlanError(what, where=str(self.directory), fix="take the index and the files of one save")
        except (OSError, SafetensorError) as error:
            what = f"{path.name} is truncated or not a safetensors file: {error}"
            raise PlanError(what, where=str(path), fix="complete the download, or save the model again") from error


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first ``most`` names as text, and the number of the others."""
    all_names = [shorten(name, 200) for name in names]
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more} more" if more > 0 else "")


def require_fit(
    what: str, lists: Mapping[str, Collection[str]], wrong: Sequence[str], *, where: str = "", fix: str
) -> None:
    """Raise one PlanError if ``wrong`` or a list of names is not empty, with the first and the number of others."""
    parts = [wrong[0] + (f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else "")] if wrong else []
    if parts := parts + [f"{how}: {listed(names)}" for how, names in lists.items() if names]:
        raise PlanError(f"{what}: {'; '.join(parts)}", where=where, fix=fix)


def _weight_map(index: Path) -> Mapping[str, str]:
    content = read_json(index, "index", fix="complete the download, or save the model again")
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise PlanError(f"{index.name} has no weight_map", where=str(index), fix="save the model again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or len(os.fsencode(file)) > 255:
            what = f"{index.name} places {shorten(name)} in {shorten(file)!r}, which is no file name"
            raise PlanError(what, where=str(index), fix="list only files of this directory")
    return places


def _check_header(path: Path) -> None:
    """Raise PlanError unless the file is a regular one, with a header of a plausible size.

    Links are followed: the cache of Hugging Face consists of links.
    """
    fix = "complete the download, or save the model again"
    with opened(path, fix) as file:
        size, num_bytes = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if size < 8 or num_bytes > size - 8:
        raise PlanError(f"{path.name} is truncated or not a safetensors file", where=str(path), fix=fix)
    if num_bytes > MOST_HEADER:
        what = f"{path.name} claims a header of {num_bytes:,} bytes, more than any model needs"
        raise PlanError(what, where=str(path), fix="store the model in several files")


def _no_weights(directory: Path, others: list[str]) -> PlanError:
    if others:
        what = f"several safetensors files ({listed(others)}) without {INDEX}"
        return PlanError(what, where=str(directory), fix="add the index that was saved with them")
    pickled = next((path.name for kind in _PICKLED for path in sorted(directory.glob(kind))), None)
    if pickled:
        what = f"the weights are pickled ({pickled}), not safetensors: slices of them cannot be read"
        fix = "convert them with transformers: from_pretrained(DIR), then save_pretrained(DIR)"
        return PlanError(what, where=str(directory), fix=fix)
    what = f"not a model directory: neither {SINGLE} nor {INDEX}"
    return PlanError(what, where=str(directory), fix="give a directory with config.json and safetensors")


def of_save(path: Path) -> AbstractContextManager[BinaryIO]:
    """Open a file of a save for reading, as ``opened``; a link is refused."""
    return opened(path, OTHER_SAVE, follows=False)


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a file of a save. Raises PlanError if it has more than ``most`` bytes."""
    with of_save(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise bad_save(path, f"has more than {most:,} bytes")
    return content


def check_size(path: Path, num_bytes: int) -> None:
    """Raise PlanError, naming the file, unless it has ``num_bytes``."""
    with of_save(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
        raise bad_save(path, f"has {size:,} bytes, but {num_bytes:,} were written")


def check_whole(path: Path, num_bytes: int, checksum: str) -> None:
    """Read a whole file. Raises PlanError, naming it, unless it has this size and checksum."""
    check_size(path, num_bytes)
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with of_save(path) as file:
        while count := file.readinto(chunk):  # pyright: ignore[reportAttributeAccessIssue]
            digest.update(chunk[:count])
            see_one("parts", count)
    if digest.hexdigest() != checksum:
        raise bad_save(path, "is damaged or belongs to another save: its checksum does not match")


def bad_save(path: Path, what: str) -> PlanError:
    """Return the error for a damaged file of a save."""
    return PlanError(f"{path.name} {what}", where=str(path), fix=OTHER_SAVE)
