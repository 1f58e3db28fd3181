"""Loads a Hugging Face directory: each rank reads its own slices, after all names, shapes and dtypes are checked."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.parameters import LocalParameter
from passes.program.matrices import Matrices
from planner.capture.model.assembly import Assembly, Source, sources
from planner.capture.model.hub_format import HubFormat
from planner.files.text import is_file, read_json, shorten
from planner.frozen_plan import Plan
from planner.progress import shown_if_slow
from planner.sharding.boxes import Box, part_of
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.hub_tensors import names_of_files, read_into, read_ranges
from runtime.checkpoint.safetensors_files import SafetensorsFiles, listed, require_fit
from runtime.checkpoint.weight_files import WeightFiles
from runtime.distributed.agreement import agreed, halfway
from runtime.distributed.groups import Groups
from runtime.weights.shards import RankWeights

FIX = "load a checkpoint of this model, or plan the model that the directory's config.json describes (MODEL hf:DIR)"
_MOST_SAMPLES = 64  # names that vote for a prefix


@dataclass(frozen=True, slots=True)
class Found:
    """The model's tensors as assemblies of stored ones: ``parameters`` by the plan's name, several if tied copies are
    stored.
    """

    parameters: Mapping[str, tuple[Assembly, ...]]
    buffers: Mapping[str, Assembly]

    @property
    def copies(self) -> dict[str, tuple[Assembly, ...]]:
        """All tensors by name."""
        return {**self.parameters, **{name: (made,) for name, made in self.buffers.items()}}


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter of a model without a plan. ``matrices``: those of a weight that is updated matrix by matrix."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...]
    matrices: Matrices | None = None


def check_pretrained(plan: Plan, directory: str | PathLike[str]) -> None:
    """Raise PlanError, naming file and tensor, unless ``directory`` holds all weights of the planned model.

    Reads headers only.
    """
    with WeightFiles(Path(directory)) as files:
        find_in(files, plan.hub, plan.parameters)


Rest = Callable[[frozenset[str], Callable[[str], Tensor]], None]


def load_pretrained(
    weights: RankWeights, directory: str | PathLike[str], rest: Rest, opened: Callable[[str], None]
) -> None:
    """Fill this rank's parameters and persistent buffers. All ranks must call it; on an error, no rank has changed.

    For an adapted model, ``directory`` is its base's. ``rest(found, read)`` is called once they are filled: with the
    names of the model's tensors that the files have, and a function that reads a full tensor by its name in the base.
    ``opened(name)`` is called before the weights of a parameter are replaced.
    Raises PlanError on every rank, naming file and tensor.
    """
    plan, groups, kept = weights.plan, weights.groups, weights.kept
    with agreed(groups):
        files = WeightFiles(Path(directory))
    with files:
        with agreed(groups):
            found = find_in(files, plan.hub, plan.parameters)
            _check_tied(files, found, weights)
            config = files.directory / "config.json"
            texts = {config.name: read_json(config, "config")} if is_file(config) else {}
            files.tell_unread()
        with halfway(groups, "the weights are"):
            made = {name: first for name, (first, *_) in found.copies.items()}
            with shown_if_slow(f"loading {shorten(files.directory)}"):
                read_all(files, made, weights, opened)
            by_base = {base: each for name, each in made.items() for base in _base_names(plan.hub, (name,))}
            rest(frozenset(made), lambda base_name: whole_of(files, by_base[base_name]))
            kept.texts.update(texts)
            kept.names.clear()
            named = ((base, each) for name, each in found.copies.items() for base in _base_names(plan.hub, (name,)))
            kept.names.update(names_of_files(named))


# ---- names


def find_in(files: SafetensorsFiles, hub: HubFormat, rows: Sequence[ParameterPlan | Described]) -> Found:
    """Match the stored tensors with ``rows``, a model's parameters. Raises one PlanError that lists all misfits."""
    names_of = {row.name: _base_names(hub, (row.name, *row.aliases)) for row in rows}
    buffers_of = {base: name for name in hub.persistent_buffers for base in _base_names(hub, (name,))}
    known = {name for names in (*names_of.values(), buffers_of) for name in names}
    converted = hub.converted({name: stored.shape for name, stored in files.tensors.items()})
    made = match_names(converted.made, known)
    parameters = {
        row: tuple(m for name in names for m in made.get(name, ())) for row, names in names_of.items() if names
    }
    buffers = {name: made[base][0] for base, name in buffers_of.items() if base in made}
    absent = [names_of[row][0] for row, stored in parameters.items() if not stored]
    absent += [base for base, name in buffers_of.items() if name not in buffers and not hub.ignores_absent(base)]
    others = [(name, source.name) for name in made if name not in known for source in sources(tuple(made[name]))]
    extra = [stored for name, stored in others if not (hub.ignores_unexpected(stored) or hub.ignores_unexpected(name))]
    twice = next(([s.name for s in sources(tuple(m))] for name, m in made.items() if name in known and len(m) > 1), [])
    wrong = [w for row in rows for m in parameters.get(row.name, ()) if (w := _misfit(files, m, row))]
    lists = {
        "absent": absent,
        f"unexpected in {_files_of(extra, files)}": extra,
        f"stored twice under different names in {_files_of(twice, files)}": twice,
    }
    one = {stored.file for stored in files.tensors.values()}
    where = str(one.pop() if len(one) == 1 else files.directory)
    require_fit("the checkpoint does not fit the model", lists, [*converted.problems, *wrong], where=where, fix=FIX)
    return Found(parameters, buffers)


def _base_names(hub: HubFormat, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that the base's files may have for a tensor; none for a tensor of an adapter."""
    return tuple(dict.fromkeys(base for name in names if (base := hub.base_name(name)) is not None))


def match_names(made: Mapping[str, list[Assembly]], known: set[str]) -> dict[str, list[Assembly]]:
    """Return ``made`` by the model's names: unknown names gain or lose a prefix if they are ``known`` then."""
    added, removed = _prefix([name for name in made if name not in known], known)
    matched: dict[str, list[Assembly]] = {}
    for name, assemblies in made.items():
        other = added + name if added else name.removeprefix(removed)
        matched.setdefault(other if name not in known and other in known else name, []).extend(assemblies)
    return matched


def _prefix(lost: Sequence[str], known: set[str]) -> tuple[str, str]:
    """Return (added, removed): the prefix with which most of the unknown names become known, if there is only one.

    A checkpoint of a base model lacks the prefix of that base in a model with a head, or the other way round.
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


def _misfit(files: SafetensorsFiles, made: Assembly, row: ParameterPlan | Described) -> str:
    """Return why these tensors cannot be the parameter of ``row``, or "" if they can."""
    stored = [files.tensors[source.name] for source in sources(made)]
    first = f"{stored[0].name} in {stored[0].file.name}"
    if made.shape != tuple(row.shape):
        if isinstance(made, Source):
            return f"{first} has shape {list(made.shape)}, the model has {list(row.shape)}"
        return f"{len(stored)} tensors like {first} make {row.name} {list(made.shape)}, the model has {list(row.shape)}"
    planned = getattr(torch, row.dtype)
    for each in stored:
        if planned.is_floating_point and not each.dtype.is_floating_point:
            kind = str(each.dtype).removeprefix("torch.")
            return f"{each.name} in {each.file.name} is stored as {kind}, the model has {row.dtype}"
    return ""


def _files_of(names: list[str], files: SafetensorsFiles) -> str:
    return listed(sorted({files.tensors[name].file.name for name in names}))


# ---- values


def _check_tied(files: SafetensorsFiles, found: Found, weights: RankWeights) -> None:
    """Raise PlanError if stored copies of a tied parameter differ in the part that this rank reads."""
    for stage in weights.program.stages:
        for parameter in stage.parameters:
            first, *others = found.parameters.get(parameter.fqn, (None,))
            for other in others:
                check_equal(files, first, other, lambda made, p=parameter: _own_part(files, made, p, weights.groups))


def check_equal(files: SafetensorsFiles, one: Assembly | None, other: Assembly, read: Callable[[Any], Tensor]) -> None:
    """Raise PlanError unless ``read`` returns the same values for both."""
    if not torch.equal(read(one), read(other)):
        names = [next(iter(sources(made))).name for made in (one, other)]
        what = f"{names[0]} and {names[1]} differ in the checkpoint, but are one tied parameter in the model"
        fix = "plan the model untied (tie_word_embeddings: false in its config)"
        raise PlanError(what, where=str(files.tensors[names[1]].file), fix=fix)


def _own_part(files: SafetensorsFiles, made: Assembly, parameter: LocalParameter, groups: Groups) -> Tensor:
    value = torch.zeros(parameter.shape, dtype=dtype_of(files, made))
    read_part(files, made, value, parameter, groups)
    return value


def dtype_of(files: SafetensorsFiles, made: Assembly) -> torch.dtype:
    """Return the smallest dtype that holds the values of all sources."""
    return reduce(torch.promote_types, (files.tensors[source.name].dtype for source in sources(made)))


@torch.no_grad()
def read_all(
    files: SafetensorsFiles, made: Mapping[str, Assembly], weights: RankWeights, opened: Callable[[str], None]
) -> None:
    """Read this rank's parts of the parameters, and the buffers, that ``made`` has."""
    for stage in weights.program.stages:
        for parameter in stage.parameters:
            if parameter.fqn in made:
                opened(parameter.fqn)
                read_part(files, made[parameter.fqn], stage.parameter(parameter.fqn).data, parameter, weights.groups)
        for fqn in stage.buffers:
            if fqn in made:
                read_whole(files, made[fqn], stage.module.get_buffer(stage.attributes[fqn]))
    for fqn, value in weights.kept.tensors.items():
        if fqn in made:
            read_whole(files, made[fqn], value)


def read_whole(files: SafetensorsFiles, made: Assembly, target: Tensor) -> None:
    read_into(target, made, Box.whole(made.shape), files.read)


def whole_of(files: SafetensorsFiles, made: Assembly) -> Tensor:
    value = torch.empty(made.shape, dtype=dtype_of(files, made))
    read_whole(files, made, value)
    return value


def read_part(
    files: SafetensorsFiles, made: Assembly, target: Tensor, parameter: LocalParameter, groups: Groups
) -> None:
    """Read this rank's part of a tensor; padding becomes zero."""
    if parameter.placement.padding:
        target.zero_()
    read_ranges(target, made, part_of(parameter, groups.mesh, groups.place).ranges, files.read)
