"""Write the weights as a Hugging Face directory: config.json, and safetensors in one file or several with an index.

    for each file, for each tensor:   the ranks that hold shards -> rank 0 -> bytes at the tensor's place in the file

A safetensors file is its header (which tensor lies at which bytes) and then the bytes, so rank 0 can write tensor after
tensor and never holds two whole ones.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.hub_format import in_its_dtype
from planner.files.atomic import open_new, write_new
from planner.files.text import shorten
from planner.frozen_plan import Plan
from planner.sharding.boxes import Box
from planner.slow_steps import see_bytes, shown_if_slow
from runtime.checkpoint.atomic_directory import replaced_directory, sync
from runtime.checkpoint.entries import MAX_SHARD_BYTES, Entry, files_of
from runtime.checkpoint.hub_names import check_names, hub_entries, made_tensors, stored_names
from runtime.checkpoint.safetensors_files import DTYPES, INDEX, SINGLE
from runtime.distributed.agreement import agreed
from runtime.distributed.exchange_json import broadcast_json
from runtime.distributed.groups import Groups
from runtime.weights.gather import fetch
from runtime.weights.shards import Kept

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save_pretrained(
    plan: Plan,
    own: Mapping[str, Tensor],
    groups: Groups,
    kept: Kept,
    directory: str | PathLike[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    names: str = "hf",
) -> None:
    """``own``: this rank's shards by name. The same call on every rank; raises PlanError on all."""
    if plan.hub.adapted is not None:
        raise PlanError(
            "peft has wrapped the planned model, and transformers does not know its names",
            where="save_pretrained",
            fix="call save_adapters for the adapters alone, or save_merged for a model that transformers loads",
        )
    entries = entries_of(plan, groups, kept)
    files = files_of(named(entries, names, plan, kept), max_shard_bytes)
    tensors = made_tensors(files, reader_of(entries, own, groups, kept), leads=groups.rank == 0)
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


def reader_of(
    entries: Iterable[Entry], own: Mapping[str, Tensor], groups: Groups, kept: Kept
) -> Callable[[str, Box, Tensor], None]:
    """Copies parts of full tensors to rank 0. Every rank calls it for the same parts, in one order."""
    rows = {entry.name: entry.row for entry in entries}

    def read(name: str, box: Box, target: Tensor) -> None:
        row = rows[name]
        if row is not None:
            fetch(row, own, box, target, groups)
        elif groups.rank == 0:
            target.copy_((kept.parameters | kept.buffers)[name][tuple(map(slice, box.start, box.stop))])

    return read


def named(entries: list[Entry], names: str, plan: Plan, kept: Kept) -> list[Entry]:
    """``entries`` of the model, or of the tensors that files of the Hub have. Raises PlanError for other names."""
    check_names(names)
    return entries if names == "model" else hub_entries(entries, stored_names(plan.hub, kept.names))


def _exhaust(tensors: Iterable[Tensor | None]) -> None:
    for _ in tensors:
        pass


# ---- writing, on rank 0


def write_directory(
    directory: Path, files: Mapping[str, list[Entry]], tensors: Iterator[Tensor | None], texts: Mapping[str, Any]
) -> None:
    """Everything into a new directory, which then takes the place of ``directory``. Raises OSError."""
    with (
        shown_if_slow(f"writing {shorten(directory)}"),
        replaced_directory(directory, is_weights, _is_index) as new,
    ):
        for name, entries in files.items():
            write_safetensors(new / name, entries, tensors)
        if len(files) > 1:
            texts = {**texts, INDEX: index_of(files)}
        for name, content in in_its_dtype(texts).items():
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
            see_bytes(entry.num_bytes)
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
    hub = plan.hub
    texts = dict(kept.texts)
    if hub.config is not None:
        texts["config.json"] = hub.config
    if hub.generation_config is not None:
        texts["generation_config.json"] = hub.generation_config
    dtypes = [row.dtype for row in plan.parameters if getattr(torch, row.dtype).is_floating_point]
    if "config.json" in texts and dtypes:
        texts["config.json"] = {**texts["config.json"], "dtype": dtypes[0]}
    return texts
