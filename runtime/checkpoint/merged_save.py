"""The base of an adapted model with its active adapters merged into it, as a Hugging Face directory.

    for each tensor of the base:   it and the adapter's parts of its layer → rank 0 → peft's merge of that layer → file

Each method of peft has its own equation (W + scale·B·A, a norm over it, a product of rotations, …), so peft's module of
the layer computes it, on full tensors of that layer alone: rank 0 never holds the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError, first_line
from planner.capture.model.adapted import Adapted, held_by
from planner.frozen_plan import Plan
from runtime.checkpoint.adapters_save import adapted_of, gathered
from runtime.checkpoint.assembled import Read
from runtime.checkpoint.entries import Entry, files_of
from runtime.checkpoint.hub_names import made_tensors, reading_whole
from runtime.checkpoint.pretrained_save import named, texts_of, write_agreed
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept


@dataclass(frozen=True, slots=True)
class Merging:
    """One tensor of the merged base. ``source``: its name in the model, before any merge.

    ``layers``: (name of a layer of peft in the model, name of the tensor below the merged layer), of those that change
    it: two if a tied weight has two.
    """

    entry: Entry
    source: str | None
    layers: tuple[tuple[str, str], ...]


def save_merged(
    plan: Plan,
    own: Mapping[str, Tensor],
    groups: Groups,
    kept: Kept,
    directory: str | PathLike[str],
    max_shard_bytes: int,
    names: str = "hf",
) -> None:
    """``own``: this rank's shards by name. The same call on every rank; raises PlanError on all."""
    merge = merge_of_plan(plan)
    files = files_of(named(merge.entries, names, plan, kept), max_shard_bytes)
    tensors = made_tensors(files, reader_merged(merge, plan, own, groups, kept), leads=groups.rank == 0)
    write_agreed(groups, Path(directory), files, tensors, merge.texts(texts_of(plan, kept)))


def merge_of_plan(plan: Plan) -> Merge:
    return Merge.of(adapted_of(plan), plan.spec.get("precision", {}).get("parameters"))


def reader_merged(merge: Merge, plan: Plan, own: Mapping[str, Tensor], groups: Groups, kept: Kept) -> Read:
    """Copies parts of merged tensors to rank 0. Every rank calls it for the same parts, in one order."""

    def full(name: str) -> Tensor | None:
        values = gathered(plan, own, groups, kept, merge.needed(merge.mergings[name]))
        return merge.merged(merge.mergings[name], values) if groups.rank == 0 else None

    return reading_whole(full)


def check_merge(plan: Plan) -> None:
    """Raise PlanError if peft cannot merge the adapters of the planned model."""
    merged_without_values(adapted_of(plan))


@dataclass(frozen=True, slots=True)
class Merge:
    """The merged base: of each of its tensors, by name, how it is made."""

    adapted: Adapted
    mergings: dict[str, Merging]
    is_tied: bool

    @property
    def entries(self) -> list[Entry]:
        return [merging.entry for merging in self.mergings.values()]

    @classmethod
    def of(cls, adapted: Adapted, cast: str | None) -> Merge:
        """``cast``: dtype of all floating tensors. Raises PlanError if peft cannot merge the adapters."""
        base = merged_without_values(adapted)
        made = {merging.entry.name: merging for merging in mergings_of(adapted, base, cast)}
        return cls(adapted, made, _is_tied(base))

    def needed(self, merging: Merging) -> list[str]:
        """Names in the model of the tensors that it reads."""
        if not merging.layers:
            return [merging.source] if merging.source else []
        return [f"{path}.{name}" for path, _ in merging.layers for name in _names(self.adapted, path)]

    def merged(self, merging: Merging, values: Mapping[str, Tensor]) -> Tensor:
        """``values``: the needed tensors in full, on the CPU."""
        return _merged(self.adapted, merging, values)

    def texts(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        """config.json without a tie that the merge has undone."""
        if "config.json" not in texts or self.is_tied:
            return dict(texts)
        return {**texts, "config.json": {**texts["config.json"], "tie_word_embeddings": False}}


def merged_without_values(adapted: Adapted) -> nn.Module:
    """The base after a merge on the meta device. Raises PlanError if peft cannot merge it."""
    methods = ", ".join(str(config.peft_type.value) for config in adapted.module.peft_config.values())
    fix = "save them by save_adapters; peft loads them beside the base"
    if not hasattr(adapted.module, "merge_and_unload"):
        what = "these adapters add to the base's inputs or activations, not to its weights: they cannot be merged"
        raise PlanError(what, where=methods, fix=fix)
    try:
        with torch.no_grad():
            return copy.deepcopy(adapted.module).merge_and_unload()
    except Exception as error:  # of peft, of many kinds
        raise PlanError(f"peft cannot merge these adapters: {first_line(error)}", where=methods, fix=fix) from None


def mergings_of(adapted: Adapted, base: nn.Module, cast: str | None) -> Iterator[Merging]:
    """Of every tensor of the merged base, in its order; a tied one once. ``cast``: dtype of all floating tensors."""
    names: dict[int, list[str]] = {}
    values = base.state_dict(keep_vars=True)
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    sources = {own: name for name, own in reversed(list(adapted.base_names.items()))}
    for of_value in names.values():
        value = values[of_value[0]]
        dtype = getattr(torch, cast) if cast and value.is_floating_point() else value.dtype
        layers = dict.fromkeys(layer for name in of_value if (layer := _layer_of(adapted, name)) is not None)
        source = next((sources[name] for name in of_value if name in sources), None)
        yield Merging(Entry(of_value[0], tuple(value.shape), dtype), source, tuple(layers))


def _layer_of(adapted: Adapted, name: str) -> tuple[str, str] | None:
    parts = name.split(".")
    for length in range(1, len(parts)):
        wrapper = adapted.wrappers.get(".".join(parts[:length]))
        if wrapper is not None:
            return wrapper, ".".join(parts[length:])
    return None


def _names(adapted: Adapted, path: str) -> list[str]:
    return list(adapted.module.get_submodule(path).state_dict(keep_vars=True))


@torch.no_grad()
def _merged(adapted: Adapted, merging: Merging, values: Mapping[str, Tensor]) -> Tensor:
    if not merging.layers:
        assert merging.source is not None, merging.entry
        return values[merging.source]
    result: Tensor | None = None
    for path, name in merging.layers:
        layer = copy.deepcopy(adapted.module.get_submodule(path))
        given = {own: values[f"{path}.{own}"].clone() for own in _names(adapted, path)}  # a merge writes in place
        if result is not None:
            given |= {own: result for own in given if adapted.base_names.get(f"{path}.{own}", "").endswith(name)}
        with held_by(layer, given):
            result = _unloaded(layer).state_dict(keep_vars=True)[name].detach()
    assert result is not None, merging.entry
    return result.to(merging.entry.dtype)


def _unloaded(layer: Any) -> nn.Module:
    """The module of the base that a layer of peft wraps, with the active adapters merged, as peft's own unloading."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    layer.merge(safe_merge=False, adapter_names=None)
    return layer.get_base_layer()


def _is_tied(base: Any) -> bool:
    """False if input and output embeddings that were tied have become two tensors."""
    pair: Sequence[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = [getattr(module, "weight", None) for module in pair]
    return None in weights or weights[0] is weights[1]
