"""A save as a Hugging Face directory, without a launch and without the model: one tensor in memory at a time."""

from __future__ import annotations

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.sharding.boxes import Box
from runtime.checkpoint.manifest import Manifest, TensorEntry
from runtime.checkpoint.pieces import PieceReader
from runtime.checkpoint.pretrained_save import MAX_SHARD_BYTES, Entry, files_of, write_directory
from runtime.checkpoint.saves import check_average


def export(save: Path, manifest: Manifest, directory: str | PathLike[str], *, averaged: bool = False) -> None:
    """Weights and persistent buffers of a verified save, as ``Engine.save_pretrained`` would write them.

    Names are the model's, a tied parameter has its first name; config.json is there if the model had one. Of a model
    that peft has wrapped it is the base with the adapters merged. The directory is replaced atomically. ``averaged``:
    the running mean of trained parameters, in the weights' dtype. Raises PlanError.
    """
    if averaged:
        check_average(save, manifest)
    texts: dict[str, Any] = {str(name): text for name, text in manifest.texts.items()}
    with PieceReader(save, manifest) as reader:
        values_of = partial(_whole, manifest, reader, averaged)
        if manifest.adapters is None:
            files = files_of(_entries(manifest), MAX_SHARD_BYTES)
            tensors = (values_of(entry.name) for held in files.values() for entry in held)
        else:
            from runtime.checkpoint.merged_export import merge_of, merged_tensors  # loads the model's code and peft

            merge = merge_of(save, manifest)
            files, texts, tensors = merge.files, merge.texts(texts), merged_tensors(merge, manifest, values_of)
        try:
            write_directory(Path(directory), files, tensors, texts)
        except OSError as error:
            raise PlanError(
                f"cannot write the export: {error.strerror}",
                where=str(error.filename or directory),
                fix="use a writable directory with space for the weights",
            ) from None


def _entries(manifest: Manifest) -> list[Entry]:
    return [
        Entry(name, tensor.shape, _dtype(tensor))
        for name, tensor in manifest.tensors.items()
        if not tensor.is_statistic
    ]


def _whole(manifest: Manifest, reader: PieceReader, averaged: bool, name: str) -> Tensor:
    tensor = manifest.tensors[name]
    kind = "ema" if averaged and "ema" in tensor.values else _kind(tensor)
    values = torch.empty(tensor.shape, dtype=_dtype(tensor))
    reader.read_into(values, name, kind, Box(tuple(0 for _ in tensor.shape), tensor.shape))
    return values


def _kind(tensor: TensorEntry) -> str:
    return "buffer" if "buffer" in tensor.values else "parameter"


def _dtype(tensor: TensorEntry) -> torch.dtype:
    return getattr(torch, tensor.values[_kind(tensor)])
