"""Exports a save as a Hugging Face directory, and imports one as a save, without a launch.

An export holds one tensor in memory at a time and does not need the model's code, except to merge adapters.

An import writes a save of weights alone, which any layout and optimizer can start from:

    headers of the files → names and shapes of the model → buckets: read → rank-0000N.safetensors → manifest, latest

One bucket is in memory at a time; values keep the dtype of the files, and a run casts them as it reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.assembly import Assembly, sources
from planner.capture.model.hub_format import HubFormat, hub_format
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.reference import load_model
from planner.files.text import is_file, read_json, writing
from planner.progress import shown_if_slow
from planner.ranks import DEFAULT_ORDER
from planner.sharding.boxes import Box
from runtime.checkpoint.atomic_directory import FIX, replaced_directory
from runtime.checkpoint.hub_tensors import (
    MAX_SHARD_BYTES,
    Entry,
    check_names,
    files_of,
    filled,
    hub_entries,
    json_of_names,
    made_tensors,
    names_of_files,
    read_into,
)
from runtime.checkpoint.lines import Line
from runtime.checkpoint.manifest import (
    MANIFEST,
    NO_OPTIMIZER,
    Axis,
    Manifest,
    OptimizerEntry,
    TensorEntry,
    draft,
    write_manifest,
)
from runtime.checkpoint.model_files import FOLDER, keep_files, model_files
from runtime.checkpoint.pieces import PieceReader, WrittenPiece, completed, write_pieces
from runtime.checkpoint.pretrained_load import Described, Found, check_equal, dtype_of, find_in, whole_of
from runtime.checkpoint.pretrained_save import write_directory
from runtime.checkpoint.safetensors_files import SafetensorsFiles
from runtime.checkpoint.saves import check_average, owned, saves_in, write_latest
from runtime.checkpoint.weight_files import WeightFiles

BUCKET_BYTES = 512 << 20
STEP = 0
_TEXTS = ("config.json", "generation_config.json")
Names = Sequence[tuple[str, tuple[str, ...]]]  # (name, aliases)


def export(
    save: Path, manifest: Manifest, directory: str | PathLike[str], *, averaged: bool = False, names: str = "hf"
) -> None:
    """Write weights and persistent buffers of a verified save, as ``Engine.save_pretrained`` would.

    ``names``: as there. ``averaged``: the running mean of trained parameters, in the weights' dtype. For a model that
    peft has wrapped, the base with the adapters merged. The directory is replaced atomically. Raises PlanError.
    """
    check_names(names)
    if averaged:
        check_average(save, manifest)
    texts: dict[str, Any] = {str(name): text for name, text in manifest.texts.items()}
    with PieceReader(save, manifest) as reader:
        read = partial(_read, manifest, reader, averaged)
        entries = {
            name: Entry(name, each.shape, getattr(torch, each.values[_kind(each)]), aliases=each.aliases)
            for name, each in manifest.tensors.items()
            if not each.is_statistic
        }
        if manifest.adapters is not None:
            from runtime.checkpoint.merged import merge_of  # loads the model's code and peft

            merge = merge_of(save, manifest)
            read = merge.reader(entries.values(), read)
            entries, texts = {entry.name: entry for entry in merge.entries}, merge.texts(texts)
        tensors = entries.values()
        files = files_of(hub_entries(tensors, manifest.names) if names == "hf" else tensors, MAX_SHARD_BYTES)
        tensors = made_tensors(files, read)
        with writing("the export", str(directory), FIX):
            write_directory(Path(directory), files, tensors, texts)


def _read(manifest: Manifest, reader: PieceReader, averaged: bool, name: str, box: Box, target: Tensor) -> None:
    tensor = manifest.tensors[name]
    reader.read_into(target, name, "ema" if averaged and "ema" in tensor.values else _kind(tensor), box)


def _kind(tensor: TensorEntry) -> str:
    return "buffer" if "buffer" in tensor.values else "parameter"


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a tensor of the save: its kind, and the assembly of the files' tensors."""

    name: str
    kind: str
    made: Assembly
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    def parts(self, most: int) -> list[Stored]:
        """Return parts of at most ``most`` bytes along dim 0 (some experts of a stack), of at least one row."""
        if self.num_bytes <= most:
            return [self]
        rows, *rest = self.made.shape
        step = max(most * rows // self.num_bytes, 1)
        ends = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [replace(self, box=Box((a, *[0] * len(rest)), (z, *rest))) for a, z in ends]


def import_weights(
    directory: Path, run: Path, model: str | None = None, *, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Path, int]:
    """Write a save with the weights of ``directory`` to ``run``; return it, and the number of its tensors.

    ``model``: a MODEL with the names of the files; None: the model of the directory's config.json. Raises PlanError,
    naming file and tensor; then nothing is written.
    """
    with WeightFiles(directory) as files:
        built = _model_of(directory, model)
        rows, hub = described(built), hub_format(built)
        found = find_in(files, hub, rows)
        files.tell_unread()
        for first, *others in found.parameters.values():  # a tied parameter may be stored under several names
            for other in others:
                check_equal(files, first, other, lambda made: whole_of(files, made))
        tensors = list(_stored(files, rows, hub, found))
        texts = {n: read_json(directory / n, "config") for n in _TEXTS if is_file(directory / n)}
        _refuse_saves(run)
        with owned(run):
            _refuse_saves(run)
            aliases = {row.name: row.aliases for row in rows}

            manifest = draft(
                step=STEP,
                line=Line.new(),
                mesh=dict.fromkeys(get_args(Axis), 1),
                order=DEFAULT_ORDER,
                zero=0,
                seed=0,
                optimizer=OptimizerEntry(name=NO_OPTIMIZER, updates=0),
                loss_scale=None,
                texts=texts,
                stored_names=json_of_names(names_of_files(found.copies.items())),
                model_files=keep_files(model_files(f"hf:{directory}", ()), run / FOLDER),
                extra={},
            )
            names = [(each.name, aliases.get(each.name, ())) for each in tensors]
            return _write(files, tensors, names, run, manifest, bucket_bytes), len(tensors)


def described(model: nn.Module) -> list[Described]:
    """Return every parameter of a model once, under its first name."""
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return [
        Described(first, tuple(p.shape), str(p.dtype).removeprefix("torch."), tuple(others))
        for first, *others in names.values()
        if (p := parameters[first]) is not None
    ]


def _model_of(directory: Path, model: str | None) -> nn.Module:
    if model is None and not is_file(directory / "config.json"):
        what = "the directory has no config.json, which names its model"
        raise PlanError(what, where=str(directory), fix="add --model MODEL, the model that has these weights")
    with meta_parameters():
        return load_model(model or f"hf:{directory}")


def _stored(files: WeightFiles, rows: Iterable[Described], hub: HubFormat, found: Found) -> Iterator[Stored]:
    """Yield the tensors of the save in the model's order, buffers last."""
    dtypes = {row.name: getattr(torch, row.dtype) for row in rows}
    tensors = [(row.name, "parameter", found.parameters[row.name][0]) for row in rows]
    tensors += [(name, "buffer", found.buffers[name]) for name in hub.persistent_buffers if name in found.buffers]
    for name, kind, made in tensors:
        is_quantised = any(source.name in files.quantised for source in sources(made))
        dtype = dtypes[name] if is_quantised else dtype_of(files, made)
        yield Stored(name, kind, made, dtype, Box.whole(made.shape))


def _refuse_saves(run: Path) -> None:
    if run.is_dir() and (saves := saves_in(run)):
        raise PlanError(
            f"the directory already has saves: {saves[-1].name}", where=str(run), fix="import to a new directory"
        )


def _write(
    files: SafetensorsFiles, tensors: Sequence[Stored], names: Names, run: Path, manifest: Manifest, bucket_bytes: int
) -> Path:
    """Write the save and return its directory. ``manifest``: the draft."""
    name = f"step-{STEP:08d}"
    parts = [part for each in tensors for part in each.parts(bucket_bytes)]
    with (
        shown_if_slow(f"importing {files.directory}"),
        writing("the save", str(run), FIX),
    ):
        with replaced_directory(run / name, lambda _: True, lambda file: file == MANIFEST) as new:
            records = [
                write_pieces(new, number, [_piece(files, each) for each in bucket], manifest.optimizer)
                for number, bucket in enumerate(filled(parts, lambda each: each.num_bytes, bucket_bytes))
            ]
            write_manifest(new / MANIFEST, completed(manifest, names, records))
        write_latest(run, name)
    return run / name


def _piece(files: SafetensorsFiles, stored: Stored) -> WrittenPiece:
    value = torch.empty(stored.box.shape, dtype=stored.dtype)
    read_into(value, stored.made, stored.box, files.read)
    return WrittenPiece(stored.name, stored.kind, stored.box, value)
