"""Write the weights as a Hugging Face directory: config.json, and safetensors in one file or several with an index.

    for each file, for each tensor:   the ranks that hold shards -> rank 0 -> bytes at the tensor's place in the file

A safetensors file is its header (which tensor lies at which bytes) and then the bytes, so rank 0 can write tensor after
tensor and never holds two whole ones.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.files.atomic import open_new, write_new
from planner.frozen_plan import Plan
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.atomic_directory import replaced_directory, sync
from runtime.checkpoint.filled import filled
from runtime.checkpoint.pretrained_load import hub_of
from runtime.checkpoint.safetensors_files import DTYPES, INDEX, SINGLE
from runtime.distributed.agreement import agreed
from runtime.distributed.exchange_json import broadcast_json
from runtime.distributed.groups import Groups
from runtime.weights.gather import whole
from runtime.weights.shards import Kept

MAX_SHARD_BYTES = 5_000_000_000
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the checkpoint. ``row``: the parameter that stages hold; None for a tensor that rank 0 holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: ParameterPlan | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_pretrained(
    plan: Plan,
    own: Mapping[str, Tensor],
    groups: Groups,
    kept: Kept,
    directory: str | PathLike[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """``own``: this rank's shards by name. The same call on every rank; raises PlanError on all."""
    if hub_of(plan).adapted is not None:
        raise PlanError(
            "peft has wrapped the planned model, and transformers does not know its names",
            where="save_pretrained",
            fix="call save_adapters for the adapters alone, or save_merged for a model that transformers loads",
        )
    files = files_of(entries_of(plan, groups, kept), max_shard_bytes)
    tensors = (whole_entry(entry, own, groups, kept) for entries in files.values() for entry in entries)
    write_agreed(groups, Path(directory), files, tensors, texts_of(plan, kept))


def write_agreed(
    groups: Groups,
    directory: Path,
    files: Mapping[str, list[Entry]],
    tensors: Iterator[Tensor | None],
    texts: Mapping[str, Any],
) -> None:
    """Every rank takes part in making ``tensors``, and rank 0 writes them; raises PlanError on all."""
    with agreed(groups, rank_0_is_long=True):
        if groups.rank == 0:
            try:
                write_directory(directory, files, tensors, texts)
            except (OSError, PlanError):
                _exhaust(tensors)  # the other ranks continue to send
                raise
        else:
            _exhaust(tensors)


def entries_of(plan: Plan, groups: Groups, kept: Kept) -> list[Entry]:
    """All tensors in the model's order; a tied parameter once, under its first name. The same on every rank."""
    unused = broadcast_json(groups, [*kept.parameters])
    rows = [
        Entry(row.name, tuple(row.shape), getattr(torch, row.dtype), None if row.name in unused else row)
        for row in plan.parameters
    ]
    buffers = [(n, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for n, b in kept.buffers.items()]
    return [*rows, *(_buffer(*given) for given in broadcast_json(groups, buffers))]


def _buffer(name: str, shape: Sequence[int], dtype: str) -> Entry:
    return Entry(name, tuple(shape), getattr(torch, dtype))


def files_of(entries: Iterable[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """File name → its tensors: filled in order up to ``max_bytes``, more only for a tensor that is larger alone."""
    if max_bytes < 1:
        raise PlanError(f"max_shard_bytes is {max_bytes}", fix="give a positive number of bytes")
    parts = filled(entries, lambda entry: entry.num_bytes, max_bytes) or [[]]
    # Wide types first: every tensor then starts at a multiple of its element's size, as readers that map files expect.
    ordered = [sorted(part, key=lambda e: -e.dtype.itemsize) for part in parts]
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    )
    return dict(zip(names, ordered, strict=True))


def whole_entry(entry: Entry, own: Mapping[str, Tensor], groups: Groups, kept: Kept) -> Tensor | None:
    """The full tensor on rank 0, None elsewhere. Every rank calls it for every entry, in one order."""
    if entry.row is not None:
        return whole(entry.row, own, entry.dtype, groups)
    return (kept.parameters | kept.buffers)[entry.name] if groups.rank == 0 else None


def _exhaust(tensors: Iterable[Tensor | None]) -> None:
    for _ in tensors:
        pass


# ---- writing, on rank 0


def write_directory(
    directory: Path, files: Mapping[str, list[Entry]], tensors: Iterator[Tensor | None], texts: Mapping[str, Any]
) -> None:
    """Everything into a new directory, which then takes the place of ``directory``. Raises OSError."""
    with replaced_directory(directory, is_weights, _is_index) as new:
        for name, entries in files.items():
            write_safetensors(new / name, entries, tensors)
        if len(files) > 1:
            texts = {**texts, INDEX: index_of(files)}
        for name, content in texts.items():
            write_new(new / name, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def is_weights(name: str) -> bool:
    return _WEIGHT_FILE.fullmatch(name) is not None


def _is_index(name: str) -> bool:
    """The file that a reader opens first: the index of all files, or the only file."""
    return name in (SINGLE, INDEX)


def write_safetensors(path: Path, entries: Sequence[Entry], tensors: Iterator[Tensor | None]) -> None:
    """One file of the next ``len(entries)`` of ``tensors``."""
    with open_new(path) as file:
        file.write(header_of(entries))
        for entry, tensor in zip(entries, tensors, strict=False):
            assert tensor is not None, entry.name
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    sync(path)


def header_of(entries: Iterable[Entry]) -> bytes:
    """Eight bytes of length, then JSON: name → dtype, shape and the range of bytes after the header."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        stop = start + entry.num_bytes
        content[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def index_of(files: Mapping[str, list[Entry]]) -> dict[str, Any]:
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    places = {entry.name: name for name, entries in files.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": places}


def texts_of(plan: Plan, kept: Kept) -> dict[str, Any]:
    """config.json with the dtype that the weights now have, and generation_config.json: of the model, or as loaded."""
    hub = hub_of(plan)
    texts = dict(kept.texts)
    if hub.config is not None:
        texts["config.json"] = hub.config
    if hub.generation_config is not None:
        texts["generation_config.json"] = hub.generation_config
    dtypes = [row.dtype for row in plan.parameters if getattr(torch, row.dtype).is_floating_point]
    if "config.json" in texts and dtypes:
        texts["config.json"] = {**texts["config.json"], "dtype": dtypes[0]}
    return texts
