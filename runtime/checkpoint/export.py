"""A save as a Hugging Face directory, without a launch and without the model: one tensor in memory at a time."""

from __future__ import annotations

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.sharding.boxes import Box
from runtime.checkpoint.assembled import Read
from runtime.checkpoint.atomic_directory import writing
from runtime.checkpoint.entries import MAX_SHARD_BYTES, Entry, files_of
from runtime.checkpoint.hub_names import check_names, hub_entries, made_tensor, made_tensors
from runtime.checkpoint.manifest import Manifest, TensorEntry
from runtime.checkpoint.pieces import PieceReader
from runtime.checkpoint.pretrained_save import write_directory
from runtime.checkpoint.saves import check_average


def export(
    save: Path, manifest: Manifest, directory: str | PathLike[str], *, averaged: bool = False, names: str = "hf"
) -> None:
    """Weights and persistent buffers of a verified save, as ``Engine.save_pretrained`` would write them.

    ``names``: likewise. config.json is there if the model had one. Of a model that peft has wrapped it is the base with
    the adapters merged. The directory is replaced atomically. ``averaged``: the running mean of trained parameters, in
    the weights' dtype. Raises PlanError.
    """
    check_names(names)
    if averaged:
        check_average(save, manifest)
    texts: dict[str, Any] = {str(name): text for name, text in manifest.texts.items()}
    with PieceReader(save, manifest) as reader:
        read = partial(_read, manifest, reader, averaged)
        entries = _entries(manifest)
        if manifest.adapters is not None:
            from runtime.checkpoint.merged_export import merge_of, read_merged  # loads the model's code and peft

            merge = merge_of(save, manifest)
            entries, texts = merge.entries, merge.texts(texts)
            read = read_merged(merge, manifest, partial(_whole, manifest, read))
        files = files_of(hub_entries(entries, manifest.names) if names == "hf" else entries, MAX_SHARD_BYTES)
        tensors = made_tensors(files, read)
        with writing("the export", directory):
            write_directory(Path(directory), files, tensors, texts)


def _entries(manifest: Manifest) -> list[Entry]:
    return [_entry(manifest, name) for name, tensor in manifest.tensors.items() if not tensor.is_statistic]


def _entry(manifest: Manifest, name: str) -> Entry:
    tensor = manifest.tensors[name]
    return Entry(name, tensor.shape, _dtype(tensor))


def _whole(manifest: Manifest, read: Read, name: str) -> Tensor:
    value = made_tensor(_entry(manifest, name), read)
    assert value is not None
    return value


def _read(manifest: Manifest, reader: PieceReader, averaged: bool, name: str, box: Box, target: Tensor) -> None:
    tensor = manifest.tensors[name]
    reader.read_into(target, name, "ema" if averaged and "ema" in tensor.values else _kind(tensor), box)


def _kind(tensor: TensorEntry) -> str:
    return "buffer" if "buffer" in tensor.values else "parameter"


def _dtype(tensor: TensorEntry) -> torch.dtype:
    return getattr(torch, tensor.values[_kind(tensor)])
