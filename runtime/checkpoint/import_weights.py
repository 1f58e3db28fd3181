"""A Hugging Face directory as a save, without a launch: weights alone, from which any layout and optimizer begins.

    headers of the files → names and shapes of the model → buckets: read → rank-0000N.safetensors → manifest, latest

One bucket is in memory at a time, with parts of a tensor that is larger; values keep the dtype of the files, and a run
casts them as it reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import __version__
from passes.errors import PlanError
from planner.capture.hub.assembly import Assembly
from planner.capture.model.hub_format import HubFormat, hub_format
from planner.capture.model.meta_init import meta_parameters
from planner.capture.model.reference import load_model
from planner.files.json_text import read_json
from planner.files.text import is_file
from planner.ranks import DEFAULT_ORDER
from planner.sharding.boxes import Box
from planner.slow_steps import shown_if_slow
from runtime.checkpoint.assembled import read_into, whole_box
from runtime.checkpoint.atomic_directory import replaced_directory, writing
from runtime.checkpoint.entries import filled
from runtime.checkpoint.hub_names import json_of_names, names_of_files
from runtime.checkpoint.lines import Line
from runtime.checkpoint.manifest import MANIFEST, NO_OPTIMIZER, Manifest, OptimizerEntry, write_manifest
from runtime.checkpoint.pieces import Record, WrittenPiece, tables_of, write_pieces
from runtime.checkpoint.pretrained_load import Described, Found, check_equal, dtype_of, find_in, read_whole
from runtime.checkpoint.safetensors_files import SafetensorsFiles
from runtime.checkpoint.saves import owned, saves_in, write_latest
from runtime.checkpoint.weight_files import WeightFiles

BUCKET_BYTES = 512 << 20
STEP = 0
_TEXTS = ("config.json", "generation_config.json")
_AXES = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "edp")


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a tensor of the save: its kind, and the tensors of the files with its values."""

    name: str
    kind: str
    made: Assembly
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    def parts(self, most: int) -> list[Stored]:
        """Of ``most`` bytes: some experts of a stack; one row at least."""
        if self.num_bytes <= most:
            return [self]
        rows, *rest = self.made.shape
        step = max(most * rows // self.num_bytes, 1)
        ends = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [replace(self, box=Box((a, *[0] * len(rest)), (z, *rest))) for a, z in ends]


def import_weights(
    directory: Path, run: Path, model: str | None = None, *, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Path, int]:
    """The new save, and how many tensors it has. ``model``: a MODEL that has the names of the files; left out, the
    model of the directory's config.json. Raises PlanError, naming file and tensor; then nothing is written.
    """
    with WeightFiles(directory) as files:
        built = _model_of(directory, model)
        rows, hub = described(built), hub_format(built)
        found = find_in(files, hub, rows)
        files.tell_unread()
        _check_tied(files, found)
        tensors = _stored(files, rows, hub, found)
        texts = {n: read_json(directory / n, "config") for n in _TEXTS if is_file(directory / n)}
        _refuse_saves(run)
        with owned(run):
            _refuse_saves(run)
            aliases = {row.name: row.aliases for row in rows}
            names = names_of_files([*found.parameters.items(), *((n, (made,)) for n, made in found.buffers.items())])
            return _write(files, tensors, aliases, run, texts, names, bucket_bytes), len(tensors)


def described(model: nn.Module) -> list[Described]:
    """Every parameter once, under its first name."""
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
        raise PlanError(
            "the directory has no config.json, which names its model",
            where=str(directory),
            fix="add --model MODEL, the model that has these weights",
        )
    with meta_parameters():
        return load_model(model or f"hf:{directory}")


def _stored(files: WeightFiles, rows: Iterable[Described], hub: HubFormat, found: Found) -> list[Stored]:
    """In the model's order, buffers last."""
    dtypes = {row.name: getattr(torch, row.dtype) for row in rows}
    made = [(row.name, "parameter", found.parameters[row.name][0]) for row in rows]
    made += [(name, "buffer", found.buffers[name]) for name in hub.persistent_buffers if name in found.buffers]
    of_files = [Stored(*each, dtype_of(files, each[-1]), whole_box(each[-1].shape)) for each in made]
    return [replace(each, dtype=dtypes[each.name]) if files.is_quantised(each.made) else each for each in of_files]


def _check_tied(files: SafetensorsFiles, found: Found) -> None:
    """Copies of a tied parameter that are stored under several names must be equal."""
    for first, *others in found.parameters.values():
        for other in others:
            check_equal(files, first, other, lambda made: _read(files, made))


def _refuse_saves(run: Path) -> None:
    if run.is_dir() and (saves := saves_in(run)):
        raise PlanError(
            f"the directory already has saves: {saves[-1].name}", where=str(run), fix="import to a new directory"
        )


def _write(
    files: SafetensorsFiles,
    tensors: Sequence[Stored],
    aliases: Mapping[str, tuple[str, ...]],
    run: Path,
    texts: Mapping[str, Any],
    stored_names: Mapping[str, Assembly],
    bucket_bytes: int,
) -> Path:
    name = f"step-{STEP:08d}"
    parts = [part for each in tensors for part in each.parts(bucket_bytes)]
    with shown_if_slow(f"importing {files.directory}"), writing("the save", run):
        with replaced_directory(run / name, lambda _: True, lambda file: file == MANIFEST) as new:
            records = [
                write_pieces(new, number, [_piece(files, each) for each in bucket], 0, {})
                for number, bucket in enumerate(filled(parts, lambda each: each.num_bytes, bucket_bytes))
            ]
            names = [(each.name, aliases.get(each.name, ())) for each in tensors]
            write_manifest(new / MANIFEST, _manifest(names, records, texts, stored_names))
        write_latest(run, name)
    return run / name


def _piece(files: SafetensorsFiles, stored: Stored) -> WrittenPiece:
    value = torch.empty(stored.box.shape, dtype=stored.dtype)
    read_into(value, stored.made, stored.box, files.read)
    return WrittenPiece(stored.name, stored.kind, stored.box, value)


def _read(files: SafetensorsFiles, made: Assembly) -> Tensor:
    value = torch.empty(made.shape, dtype=dtype_of(files, made))
    read_whole(files, made, value)
    return value


def _manifest(
    names: Iterable[tuple[str, tuple[str, ...]]],
    records: Sequence[Record],
    texts: Mapping[str, Any],
    stored_names: Mapping[str, Assembly],
) -> Manifest:
    files, tensors = tables_of(names, records)
    return Manifest(
        meshwright=__version__,
        step=STEP,
        line=Line.new(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        mesh=dict.fromkeys(_AXES, 1),  # pyright: ignore[reportArgumentType] - pydantic checks it
        order=DEFAULT_ORDER,
        zero=0,
        seed=0,
        optimizer=OptimizerEntry(name=NO_OPTIMIZER, updates=0),
        loss_scale=None,
        files=files,
        tensors=tensors,
        texts=dict(texts),  # pyright: ignore[reportArgumentType]
        stored_names=json_of_names(stored_names),
        extra={},
    )
