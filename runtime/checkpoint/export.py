"""A save as a Hugging Face directory, without a launch and without the model: one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.sharding.boxes import Box
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.pieces import PieceReader
from runtime.checkpoint.pretrained_save import MAX_SHARD_BYTES, Entry, files_of, write_directory
from runtime.checkpoint.saves import check_average


def export(save: Path, manifest: Manifest, directory: str | PathLike[str], *, averaged: bool = False) -> None:
    """Weights and persistent buffers of a verified save, as ``Engine.save_pretrained`` would write them.

    Names are the model's, a tied parameter has its first name; config.json is there if the model had one. The
    directory is replaced atomically. ``averaged``: the running mean of trained parameters, in the weights' dtype.
    Raises PlanError.
    """
    if averaged:
        check_average(save, manifest)
    entries, kinds = [], {}
    for name, tensor in manifest.tensors.items():
        kinds[name] = "buffer" if "buffer" in tensor.values else "parameter"
        entries.append(Entry(name, tensor.shape, getattr(torch, tensor.values[kinds[name]])))
        if averaged and "ema" in tensor.values:
            kinds[name] = "ema"
    files = files_of(entries, MAX_SHARD_BYTES)
    with PieceReader(save, manifest) as reader:
        tensors = _whole((entry for held in files.values() for entry in held), kinds, reader)
        try:
            write_directory(Path(directory), files, tensors, {str(name): text for name, text in manifest.texts.items()})
        except OSError as error:
            raise PlanError(
                f"cannot write the export: {error.strerror}",
                where=str(error.filename or directory),
                fix="use a writable directory with space for the weights",
            ) from None


def _whole(entries: Iterator[Entry], kinds: dict[str, str], reader: PieceReader) -> Iterator[Tensor]:
    for entry in entries:
        values = torch.empty(entry.shape, dtype=entry.dtype)
        reader.read_into(values, entry.name, kinds[entry.name], Box(tuple(0 for _ in entry.shape), entry.shape))
        yield values
