"""Writes the weights as a Hugging Face directory: config.json, and safetensors in one file or several with an index.

    for each file, for each tensor:   the ranks that hold shards -> rank 0 -> bytes at the tensor's place in the file

A safetensors file is a header with the byte range of each tensor, then the bytes: rank 0 writes one tensor after
another and never holds two full ones.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.capture.model.hub_format import in_its_dtype
from planner.files.atomic import open_new, write_new
from planner.files.text import shorten
from planner.progress import see_one, shown_if_slow
from planner.sharding.boxes import Box
from runtime.checkpoint.atomic_directory import replaced_directory, sync
from runtime.checkpoint.hub_tensors import Entry, Read, check_names, hub_entries, stored_names
from runtime.checkpoint.safetensors_files import DTYPES, INDEX, SINGLE
from runtime.distributed.agreement import broadcast_json
from runtime.weights.shards import RankWeights, fetch

_CODES = {dtype: code for code, dtype in DTYPES.items()}
README = "README.md"
_TIED = """# Weights

Tied parameters are stored once, under their first names. Load them into your model with `strict=False`:

    from pathlib import Path
    from safetensors.torch import load_file

    for path in Path().glob("*.safetensors"):
        model.load_state_dict(load_file(path), strict=False)

Left out, and tied to:

"""
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def entries_of(weights: RankWeights) -> list[Entry]:
    """Return all tensors in the model's order, on every rank; a tied parameter once, under its first name."""
    groups, kept = weights.groups, weights.kept
    unused = broadcast_json(groups, [*kept.parameters])
    rows = [
        Entry(r.name, tuple(r.shape), getattr(torch, r.dtype), None if r.name in unused else r, aliases=r.aliases)
        for r in weights.plan.parameters
    ]
    buffers = [(n, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for n, b in kept.buffers.items()]
    return rows + [Entry(n, tuple(shape), getattr(torch, d)) for n, shape, d in broadcast_json(groups, buffers)]


def reader_of(entries: Iterable[Entry], own: Mapping[str, Tensor], weights: RankWeights) -> Read:
    """Return a function that copies parts of full tensors to rank 0. All ranks must call it for the same parts."""
    rows = {entry.name: entry.row for entry in entries}

    def read(name: str, box: Box, target: Tensor) -> None:
        row = rows[name]
        if row is not None:
            fetch(row, own, box, target, weights.groups)
        elif weights.groups.rank == 0:
            target.copy_(weights.kept.tensors[name][box.slices])

    return read


def named(entries: list[Entry], names: str, weights: RankWeights) -> list[Entry]:
    """Return ``entries`` for names "model", those of files of the Hub for "hf". Raises PlanError for other names."""
    check_names(names)
    return entries if names == "model" else hub_entries(entries, stored_names(weights.plan.hub, weights.kept.names))


# ---- writing, on rank 0


def write_directory(
    directory: Path, files: Mapping[str, list[Entry]], tensors: Iterator[Tensor | None], texts: Mapping[str, Any]
) -> None:
    """Write everything to a new directory, which then replaces ``directory``. Raises OSError."""
    with (
        shown_if_slow(f"writing {shorten(directory)}"),
        replaced_directory(directory, is_weights, (SINGLE, INDEX).__contains__) as new,
    ):
        for name, entries in files.items():
            write_safetensors(new / name, entries, tensors)
        if len(files) > 1:
            texts = {**texts, INDEX: index_of(files)}
        for name, content in in_its_dtype(texts).items():
            write_new(new / name, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
        tied = [f"- {alias}: {e.name}\n" for entries in files.values() for e in entries for alias in e.aliases]
        if tied and "config.json" not in texts and not (directory / README).exists():  # a user's own text stays
            write_new(new / README, (_TIED + "".join(tied)).encode())


def is_weights(name: str) -> bool:
    return _WEIGHT_FILE.fullmatch(name) is not None


def write_safetensors(path: Path, entries: Sequence[Entry], tensors: Iterator[Tensor | None]) -> None:
    """Write a file of the next ``len(entries)`` of ``tensors``."""
    with open_new(path) as file:
        file.write(header_of(entries))
        for entry, tensor in zip(entries, tensors, strict=False):
            assert tensor is not None, entry.name
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            see_one("parts", entry.num_bytes)
    sync(path)


def header_of(entries: Iterable[Entry]) -> bytes:
    """Return the header: its length in 8 bytes, then JSON: name → dtype, shape and range of bytes after the header."""
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


def texts_of(weights: RankWeights) -> dict[str, Any]:
    """Return config.json with the dtype of the weights, and generation_config.json: the model's, or as loaded."""
    hub, texts = weights.plan.hub, dict(weights.kept.texts)
    if hub.config is not None:
        texts["config.json"] = hub.config
    if hub.generation_config is not None:
        texts["generation_config.json"] = hub.generation_config
    dtypes = [row.dtype for row in weights.plan.parameters if getattr(torch, row.dtype).is_floating_point]
    if "config.json" in texts and dtypes:
        texts["config.json"] = {**texts["config.json"], "dtype": dtypes[0]}
    return texts
