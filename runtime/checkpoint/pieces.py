"""Pieces of tensors in safetensors files, one file for each rank that writes: written, checked and read.

rank-00003.safetensors      exp_avg/blocks.0.mlp.up.weight@0,768 → the box of the full tensor that begins at [0, 768]
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from planner.capture.model.eager import plain_name
from planner.sharding.boxes import Box
from runtime.checkpoint.hub_tensors import Entry
from runtime.checkpoint.manifest import FileEntry, Manifest, OptimizerEntry, TensorEntry, key_of, now
from runtime.checkpoint.pretrained_save import header_of
from runtime.checkpoint.safetensors_files import OTHER_SAVE, OpenFiles, StoredTensor, bad_save, check_whole, of_save

_CHUNK = 16 << 20  # bytes: a thread that writes during steps should seldom take the GIL


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """The ``values`` of one kind in a ``box`` of the full tensor ``name``."""

    name: str
    kind: str
    box: Box
    values: Tensor

    @property
    def entry(self) -> Entry:
        key = key_of(self.kind, self.name, self.box.start)
        return Entry(key, tuple(self.values.shape), self.values.dtype)


@dataclass(frozen=True, slots=True)
class Record:
    """The report of one rank on its ``file``, None if it has nothing to write. ``updates``: number of updates;
    ``rested``: numbers of parameters that had fewer.
    """

    file: FileEntry | None
    pieces: tuple[tuple[str, str, str, Box], ...]  # name, kind, dtype, box
    updates: int = 0
    rested: Mapping[str, int] = field(default_factory=dict)


def write_pieces(directory: Path, rank: int, pieces: Sequence[WrittenPiece], optimizer: OptimizerEntry) -> Record:
    """Write this rank's file and sync it to the disk. Raises OSError."""
    counts = optimizer.updates, optimizer.rested
    if not pieces:
        return Record(None, (), *counts)
    ordered = sorted(pieces, key=lambda piece: piece.entry.by_width())
    path, digest, size = directory / f"rank-{rank:05d}.safetensors", xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for part in (header_of(piece.entry for piece in ordered), *ordered):
            values = part if isinstance(part, bytes) else part.values.detach().cpu().contiguous().view(-1)
            content = memoryview(values if isinstance(values, bytes) else values.view(torch.uint8).numpy().data)
            for start in range(0, len(content), _CHUNK):
                digest.update(content[start : start + _CHUNK])
                file.write(content[start : start + _CHUNK])
            size += len(content)
        file.flush()
        os.fsync(file.fileno())
    written = tuple((p.name, p.kind, str(p.values.dtype).removeprefix("torch."), p.box) for p in pieces)
    return Record(FileEntry(name=path.name, bytes=size, checksum=digest.hexdigest()), written, *counts)


def completed(draft: Manifest, names: Iterable[tuple[str, tuple[str, ...]]], records: Sequence[Record]) -> Manifest:
    """Return the manifest of a save, from the draft of rank 0 and the records of all ranks.

    ``names``: (name, aliases) of all tensors, in order.
    """
    written = [record for record in records if record.file is not None]
    values: dict[str, dict[str, str]] = {}
    places: dict[str, dict[Box, int]] = {}
    for index, record in enumerate(written):
        for name, kind, dtype, box in record.pieces:
            values.setdefault(name, {})[kind] = dtype
            places.setdefault(name, {})[box] = index
    tensors = {}
    assert {name for name, _ in names} == places.keys(), "the ranks have written other tensors than the plan has"
    for name, aliases in names:
        boxes = places[name]
        shape = tuple(map(max, *(box.stop for box in boxes))) if len(boxes) > 1 else next(iter(boxes)).stop
        pieces = tuple((index, box.start, box.stop) for box, index in boxes.items())
        tensors[name] = TensorEntry(shape=shape, values=values[name], aliases=aliases, pieces=pieces)  # pyright: ignore[reportArgumentType]
    # a rank without trainable parameters counts no updates
    updates = max(record.updates for record in records)
    rested = {name: count for record in records for name, count in record.rested.items()}
    optimizer = draft.optimizer.model_copy(update={"updates": updates, "rested": rested})
    changes = {"files": tuple(record.file for record in written), "tensors": tensors, "written": now()}
    return draft.model_copy(update=changes | {"optimizer": optimizer})


class PieceReader(OpenFiles):
    """A reader of boxes of full tensors in a save's files. ``needed``: the names of the files to open.

    Raises PlanError, naming the file, if a header contradicts the manifest.
    """

    fix = OTHER_SAVE

    def __init__(self, directory: Path, manifest: Manifest, needed: Iterable[str] | None = None) -> None:
        self._directory, self._manifest = directory, manifest
        self._stored: dict[int, dict[str, StoredTensor]] = {}  # index of a file → tensors by their names in plans
        self._wanted = {file.name for file in manifest.files} if needed is None else set(needed)
        super().__init__()

    def read_into(self, target: Tensor, name: str, kind: str, box: Box) -> None:
        """Copy ``box`` of the full tensor ``name`` to ``target``, which has the shape of the box. No other pages of the
        files are read.
        """
        num_read = 0
        for index, start, stop in self._manifest.tensors[name].pieces:
            common = Box(start, stop).intersection(box)
            if common is not None:
                within = Box(*(tuple(map(sub, end, start)) for end in (common.start, common.stop)))
                self.read_stored(self._stored[index][key_of(kind, name, start)], within, target[common.slices_in(box)])
                num_read += common.num_elements
        assert num_read == box.num_elements, f"{name}: {num_read} of {box.num_elements} elements"

    def _open_all(self) -> None:
        files = {index: entry for index, entry in enumerate(self._manifest.files) if entry.name in self._wanted}
        expected = _expected(self._manifest, files)
        for index, entry in files.items():
            path = self._directory / entry.name
            with of_save(path):
                pass  # raises unless it is a regular file
            try:
                stored = self._stored[index] = {plain_name(each.name): each for each in self._tensors_in(path)}
            except (OSError, SafetensorError) as error:
                raise bad_save(path, f"does not match the manifest: {error}") from error
            if {name: (each.shape, str(each.dtype)) for name, each in stored.items()} != expected[index]:
                raise bad_save(path, "does not match the manifest: it contains other tensors")


def check_files(directory: Path, files: Iterable[FileEntry]) -> None:
    """Raise PlanError, naming the file, unless each file is complete."""
    for entry in files:
        check_whole(directory / entry.name, entry.bytes, entry.checksum)


def _expected(manifest: Manifest, files: Iterable[int]) -> dict[int, dict[str, tuple[tuple[int, ...], str]]]:
    """Return, for each of the files, key → shape and dtype of its tensors by the manifest."""
    keys: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {index: {} for index in files}
    for name, entry in manifest.tensors.items():
        for index, start, stop in entry.pieces:
            if index in keys:
                shape = Box(start, stop).shape
                keys[index] |= {key_of(kind, name, start): (shape, f"torch.{d}") for kind, d in entry.values.items()}
    return keys
