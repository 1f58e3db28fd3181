"""Load a Hugging Face directory: every rank reads its own slices, and nothing is written before everything is right.

names of the files -> names of the model      renamings of transformers, then one prefix that is there or not
check on every rank, agree                    names, shapes, dtypes, files complete, tied copies equal
read                                          Part.ranges of each parameter, straight into its place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.parameters import LocalParameter
from passes.stage_module import StageModule
from planner.capture.model.compiled import plain_name
from planner.capture.model.hub_format import HubFormat
from planner.files.json_text import read_json
from planner.files.text import is_file
from planner.frozen_plan import Plan
from planner.sharding.parts import part_of
from runtime.checkpoint.safetensors_files import SafetensorsFiles, StoredTensor, listed
from runtime.distributed.agreement import agree, agreed
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept

FIX = "load a checkpoint of this model, or plan the model that the directory's config.json describes (MODEL hf:DIR)"
_MOST_SAMPLES = 64  # names that vote for a prefix


@dataclass(frozen=True, slots=True)
class Found:
    """The stored names of the model's tensors: ``parameters`` by the plan's name, several if tied copies are stored."""

    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, str]


class OfModel(Protocol):
    """A parameter of a model: a plan's row, or one that is described without a plan."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


def hub_of(plan: Plan) -> HubFormat:
    """Facts about checkpoints from the planned model."""
    return plan.decisions.hub if plan.decisions is not None else HubFormat()


def check_pretrained(plan: Plan, directory: str | PathLike[str]) -> None:
    """Raise PlanError, naming file and tensor, unless ``directory`` holds all weights of the planned model.

    Reads headers only.
    """
    with SafetensorsFiles(Path(directory)) as files:
        find(files, plan)


Rest = Callable[[frozenset[str], Callable[[str], Tensor]], None]


def load_pretrained(
    plan: Plan,
    stages: Sequence[StageModule],
    groups: Groups,
    kept: Kept,
    directory: str | PathLike[str],
    rest: Rest = lambda found, read: None,
    opened: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill this rank's parameters and persistent buffers. The same call on every rank; all succeed or none has changed.

    The directory of an adapted model is its base's. ``rest(found, read)`` is called once these are filled: with the
    names of the model's tensors that were found, and a function that reads a full tensor by its name in the base.
    ``opened(name)`` is called before the weights of a parameter are replaced.
    Raises PlanError on every rank, naming file and tensor.
    """
    with agreed(groups):
        files = SafetensorsFiles(Path(directory))
    with files:
        with agreed(groups):
            found = find(files, plan)
            _check_tied(files, found, stages, groups)
            config = files.directory / "config.json"
            texts = {config.name: read_json(config, "config")} if is_file(config) else {}
        try:
            _read(files, found, stages, groups, kept, opened)
            rest(frozenset((*found.parameters, *found.buffers)), partial(_full, files, found, hub_of(plan)))
            kept.texts.update(texts)
            error = None
        except (PlanError, OSError) as failed:  # a file that changed since it was checked, or a disk that fails
            what = failed.what if isinstance(failed, PlanError) else str(failed)
            error = PlanError(f"loading failed halfway, and the weights are incomplete: {what}", fix="load them again")
        agree(groups, error)


# ---- which file holds which tensor


def find(files: SafetensorsFiles, plan: Plan) -> Found:
    """Match the stored tensors with the plan's parameters. Raises one PlanError that lists all that does not fit."""
    return find_in(files, hub_of(plan), plan.parameters)


def find_in(files: SafetensorsFiles, hub: HubFormat, rows: Sequence[OfModel]) -> Found:
    """Match the stored tensors with ``rows``, the parameters of a model. Raises PlanError likewise."""
    names_of = {row.name: _base_names(hub, (row.name, *row.aliases)) for row in rows}
    buffers_of = {base: name for name in hub.persistent_buffers for base in _base_names(hub, (name,))}
    known = {name for names in (*names_of.values(), buffers_of) for name in names}
    names = match_names(files.tensors, known, hub)
    places: dict[str, list[str]] = {}
    for stored, name in names.items():
        places.setdefault(name, []).append(stored)
    parameters = {
        row: tuple(stored for name in names for stored in places.get(name, ()))
        for row, names in names_of.items()
        if names
    }
    buffers = {name: places[base][0] for base, name in buffers_of.items() if base in places}
    absent = [names_of[row][0] for row, stored in parameters.items() if not stored]
    absent += [base for base, name in buffers_of.items() if name not in buffers and not hub.ignores_absent(base)]
    extra = [s for s, name in names.items() if name not in known and not _ignored(hub, s, name)]
    twice = [stored for stored in places.values() if len(stored) > 1]
    wrong = [w for row in rows for s in parameters.get(row.name, ()) if (w := _misfit(files.tensors[s], row))]
    _raise_misfits(files, hub, absent, extra, twice, wrong)
    return Found(parameters, buffers)


def _base_names(hub: HubFormat, names: Iterable[str]) -> tuple[str, ...]:
    """The names that the base's files may have for a tensor; none for one of an adapter."""
    return tuple(dict.fromkeys(base for name in names if (base := hub.base_name(name)) is not None))


def match_names(stored: Iterable[str], known: set[str], hub: HubFormat) -> dict[str, str]:
    """Stored name → the model's name for it, or a guess that is not in ``known`` if the model has none."""
    names = {}
    for name in stored:
        renamed = hub.rename(plain_name(name))
        names[name] = name if name in known and renamed not in known else renamed
    lost = [name for name in names.values() if name not in known]
    added, removed = _prefix(lost, known)
    for name, renamed in names.items():
        if renamed not in known:
            other = added + renamed if added else renamed.removeprefix(removed)
            names[name] = other if other in known else renamed
    return names


def _prefix(lost: Sequence[str], known: set[str]) -> tuple[str, str]:
    """The one prefix that, put before the lost names or taken off them, finds most of them; as (added, removed).

    A checkpoint of a base model lacks the name under which a model with a head holds that base; or the other way round.
    """
    votes: Counter[tuple[str, str]] = Counter()
    for name in lost[:_MOST_SAMPLES]:
        for other in sorted(known):
            if other.endswith(f".{name}"):
                votes[other.removesuffix(name), ""] += 1
            elif name.endswith(f".{other}"):
                votes["", name.removesuffix(other)] += 1
    hits = {pair: sum((pair[0] + n if pair[0] else n.removeprefix(pair[1])) in known for n in lost) for pair in votes}
    most = max(hits.values(), default=0)
    best = [pair for pair, count in hits.items() if count == most]
    return best[0] if len(best) == 1 else ("", "")


def _ignored(hub: HubFormat, stored: str, name: str) -> bool:
    return hub.ignores_unexpected(stored) or hub.ignores_unexpected(name)


def _misfit(stored: StoredTensor, row: OfModel) -> str:
    """Why this tensor cannot be the parameter of ``row``; empty if it can."""
    if stored.shape != tuple(row.shape):
        return f"{stored.name} in {stored.file.name} has shape {list(stored.shape)}, the model has {list(row.shape)}"
    planned = getattr(torch, row.dtype)
    if stored.dtype is None or (planned.is_floating_point and not stored.dtype.is_floating_point):
        kind = str(stored.dtype).removeprefix("torch.") if stored.dtype else "a quantised type"
        return f"{stored.name} in {stored.file.name} is stored as {kind}, the model has {row.dtype}"
    return ""


def _raise_misfits(
    files: SafetensorsFiles,
    hub: HubFormat,
    absent: list[str],
    extra: list[str],
    twice: list[list[str]],
    wrong: list[str],
) -> None:
    many = sorted({files.tensors[name].file for name in (*extra, *(name for names in twice for name in names))})
    problems = [wrong[0] + (f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else "")] if wrong else []
    if absent:
        problems.append(f"absent: {listed(absent)}")
    if extra:
        problems.append(f"unexpected in {listed(f.name for f in many)}: {listed(extra)}")
    if twice:
        problems.append(f"stored twice under different names: {listed(twice[0])}")
    if not problems:
        return
    fix = FIX
    if converted := [name for name in extra if hub.converted(name)]:
        fix = (
            f"tensors like {converted[0]} must be merged: load the model once with transformers' "
            "from_pretrained, then save_pretrained(…, save_original_format=False)"
        )
    one = {stored.file for stored in files.tensors.values()}
    where = one.pop() if len(one) == 1 else files.directory
    raise PlanError(f"the checkpoint does not fit the model: {'; '.join(problems)}", where=str(where), fix=fix)


# ---- values


def _check_tied(files: SafetensorsFiles, found: Found, stages: Sequence[StageModule], groups: Groups) -> None:
    """Copies of a tied parameter that are stored under several names must be equal in the part that this rank reads."""
    for stage in stages:
        for parameter in stage.parameters:
            first, *others = found.parameters.get(parameter.fqn, ("",))
            if others:
                values = [torch.zeros(parameter.shape, dtype=files.tensors[n].dtype) for n in (first, *others)]
                for value, name in zip(values, (first, *others), strict=True):
                    read_part(files, name, value, parameter, groups)
                for value, name in zip(values[1:], others, strict=True):
                    if not torch.equal(value, values[0]):
                        raise PlanError(
                            f"{first} and {name} differ in the checkpoint, but are one tied parameter in the model",
                            where=str(files.tensors[name].file),
                            fix="plan the model untied (tie_word_embeddings: false in its config)",
                        )


@torch.no_grad()
def _read(
    files: SafetensorsFiles,
    found: Found,
    stages: Sequence[StageModule],
    groups: Groups,
    kept: Kept,
    opened: Callable[[str], None],
) -> None:
    for stage in stages:
        for parameter in stage.parameters:
            if parameter.fqn in found.parameters:
                opened(parameter.fqn)
                target = stage.parameter(parameter.fqn).data
                read_part(files, found.parameters[parameter.fqn][0], target, parameter, groups)
        for fqn in stage.buffers:
            if fqn in found.buffers:
                files.read_into(stage.module.get_buffer(stage.attributes[fqn]), found.buffers[fqn])
    for fqn, value in kept.parameters.items():
        if fqn in found.parameters:
            files.read_into(value, found.parameters[fqn][0])
    for fqn, value in kept.buffers.items():
        if fqn in found.buffers:
            files.read_into(value, found.buffers[fqn])


def _full(files: SafetensorsFiles, found: Found, hub: HubFormat, base_name: str) -> Tensor:
    """The full tensor of a base, by its name there."""
    stored = {base: names[0] for fqn, names in found.parameters.items() for base in _base_names(hub, (fqn,))}
    held = files.tensors[stored[base_name]]
    value = torch.empty(held.shape, dtype=held.dtype)
    files.read_into(value, held.name)
    return value


def read_part(files: SafetensorsFiles, name: str, target: Tensor, parameter: LocalParameter, groups: Groups) -> None:
    """This rank's part of a stored tensor; padding is zero."""
    if parameter.placement.padding:
        target.zero_()
    files.read_into(target, name, part_of(parameter, groups.mesh, groups.place).ranges)
