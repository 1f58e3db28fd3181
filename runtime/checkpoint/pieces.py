"""Pieces of tensors in safetensors files, one file for each rank that writes: out, checked together, and in again.

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

_CHUNK = 16 << 20  # bytes: a thread that writes beside the steps is to take Python's lock seldom


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """``values`` of one kind, of ``box`` of the full tensor ``name``."""

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
    """One rank's report of its file: ``file`` None if it had nothing to write. ``updates``: of its optimizer;
    ``rested``: of parameters that had fewer."""

    file: FileEntry | None
    held: tuple[tuple[str, str, str, Box], ...]  # name, kind, dtype, box
    updates: int = 0
    rested: Mapping[str, int] = field(default_factory=dict)


def write_pieces(directory: Path, rank: int, pieces: Sequence[WrittenPiece], optimizer: OptimizerEntry) -> Record:
    """This rank's file, on the disk when it returns. Raises OSError."""
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
    held = tuple((p.name, p.kind, str(p.values.dtype).removeprefix("torch."), p.box) for p in pieces)
    return Record(FileEntry(name=path.name, bytes=size, checksum=digest.hexdigest()), held, *counts)


def completed(draft: Manifest, names: Iterable[tuple[str, tuple[str, ...]]], records: Sequence[Record]) -> Manifest:
    """The manifest of a save, from the draft of rank 0 and the records of all ranks. ``names`` with aliases, in
    order."""
    written = [record for record in records if record.file is not None]
    values: dict[str, dict[str, str]] = {}
    places: dict[str, dict[Box, int]] = {}
    for index, record in enumerate(written):
        for name, kind, dtype, box in record.held:
            values.setdefault(name, {})[kind] = dtype
            places.setdefault(name, {})[box] = index
    tensors = {}
    assert {name for name, _ in names} == places.keys(), "the ranks have written other tensors than the plan has"
    for name, aliases in names:
        held = places[name]
        shape = tuple(map(max, *(box.stop for box in held))) if len(held) > 1 else next(iter(held)).stop
        pieces = tuple((index, box.start, box.stop) for box, index in held.items())
        tensors[name] = TensorEntry(shape=shape, values=values[name], aliases=aliases, pieces=pieces)  # pyright: ignore[reportArgumentType]
    # A rank without trainable parameters knows of no updates.
    updates = max(record.updates for record in records)
    rested = {name: count for record in records for name, count in record.rested.items()}
    optimizer = draft.optimizer.model_copy(update={"updates": updates, "rested": rested})
    changes = {"files": tuple(record.file for record in written), "tensors": tensors, "written": now()}
    return draft.model_copy(update=changes | {"optimizer": optimizer})


class PieceReader(OpenFiles):
    """Reads boxes of full tensors from a save's files.

    ``needed``: the names of the files that are opened. Raises PlanError, naming it, for a file with a header that
    contradicts the manifest.
    """

    fix = OTHER_SAVE

    def __init__(self, directory: Path, manifest: Manifest, needed: Iterable[str] | None = None) -> None:
        self._directory, self._manifest = directory, manifest
        self._stored: dict[int, dict[str, StoredTensor]] = {}  # of a file: by names as plans have them
        self._wanted = {file.name for file in manifest.files} if needed is None else set(needed)
        super().__init__()

    def read_into(self, target: Tensor, name: str, kind: str, box: Box) -> None:
        """Copy ``box`` of the full tensor ``name`` to ``target``, which has its shape. No other pages are touched."""
        found = 0
        for index, start, stop in self._manifest.tensors[name].pieces:
            held = Box(start, stop)
            common = held.intersection(box)
            if common is not None:
                within = Box(*(tuple(map(sub, end, start)) for end in (common.start, common.stop)))
                self.read_stored(self._stored[index][key_of(kind, name, start)], within, target[common.slices_in(box)])
                found += common.num_elements
        assert found == box.num_elements, f"{name}: {found} of {box.num_elements} elements"

    def _open_all(self) -> None:
        files = {index: entry for index, entry in enumerate(self._manifest.files) if entry.name in self._wanted}
        expected = _expected(self._manifest, files)
        for index, entry in files.items():
            path = self._directory / entry.name
            with of_save(path):
                pass  # that it is a regular file
            try:
                stored = self._stored[index] = {plain_name(each.name): each for each in self._tensors_in(path)}
            except (OSError, SafetensorError) as error:
                raise bad_save(path, f"does not match the manifest: {error}") from error
            if {name: (each.shape, str(each.dtype)) for name, each in stored.items()} != expected[index]:
                raise bad_save(path, "does not match the manifest: it contains other tensors")


def check_files(directory: Path, files: Iterable[FileEntry]) -> None:
    """Raise PlanError, naming the file, unless each is complete."""
    for entry in files:
        check_whole(directory / entry.name, entry.bytes, entry.checksum)


def _expected(manifest: Manifest, files: Iterable[int]) -> dict[int, dict[str, tuple[tuple[int, ...], str]]]:
    """Of each of the files: key → shape and dtype."""
    found: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {index: {} for index in files}
    for name, entry in manifest.tensors.items():
        for index, start, stop in entry.pieces:
            if index in found:
                shape = Box(start, stop).shape
                found[index] |= {key_of(kind, name, start): (shape, f"torch.{d}") for kind, d in entry.values.items()}
    return found
