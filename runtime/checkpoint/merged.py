"""A model as a Hugging Face directory, or the base of an adapted one with its active adapters merged into it.

    for each tensor of the base:   it and the adapter's parts of its layer → rank 0 → peft's merge of that layer → file

Each method of peft has its own equation (W + scale·B·A, a norm over it, a product of rotations, …), so peft's module of
the layer computes it, on full tensors of that layer alone: rank 0 never holds the model.

An export of a save runs without a launch: it builds the modules from the configs in the save, without values. The base
must be a model of transformers, and the adapters as peft builds them from their config.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError, refusing
from planner.capture.model.hub_format import Adapted, adapted, describe_adapters, held_by, in_its_dtype
from planner.capture.model.reference import CONFIG, load_model
from planner.capture.model.reference import named as wrapped
from runtime.checkpoint.adapters import DEFAULT, adapted_in
from runtime.checkpoint.hub_tensors import Entry, Read, by_any_name, files_of, gathered, made_tensors, reading_whole
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.pretrained_save import entries_of, named, reader_of, texts_of, write_directory
from runtime.checkpoint.safetensors_files import listed
from runtime.distributed.agreement import agreed
from runtime.weights.shards import RankWeights

FIX = (
    "resume the run with --save-merged DIR or --save-adapters DIR; in Python: engine.load(DIR), then engine.save_merged"
)


@dataclass(frozen=True, slots=True)
class Merging:
    """One tensor of the merged base. ``source``: its name in the model, before any merge.

    ``layers``: (name of a layer of peft in the model, name of the tensor below the merged layer) of each layer that
    changes it; a tied weight may have two.
    """

    entry: Entry
    source: str | None
    layers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Outgoing:
    """Tensors to write, and config files by name. ``reader``: this rank's shards by name → a ``Read`` that copies parts
    of full tensors to rank 0, which all ranks must call for the same parts in one order.
    """

    entries: list[Entry]
    reader: Callable[[Mapping[str, Tensor]], Read]
    texts: dict[str, Any]


def outgoing(weights: RankWeights, names: str, *, merged: bool) -> Outgoing:
    """Return the tensors of the model, or of the base with its adapters ``merged``. All ranks must call it."""
    plan, texts, entries, leads = weights.plan, texts_of(weights), entries_of(weights), weights.groups.rank == 0
    if not merged:
        return Outgoing(named(entries, names, weights), lambda own: reader_of(entries, own, weights), texts)
    merge = Merge.of(adapted_in(plan.hub), plan.spec.get("precision", {}).get("parameters"))
    out = named(merge.entries, names, weights)
    return Outgoing(
        out, lambda own: merge.reader(entries, reader_of(entries, own, weights), leads=leads), merge.texts(texts)
    )


def save_hub(
    weights: RankWeights,
    own: Mapping[str, Tensor],
    directory: str | PathLike[str],
    *,
    max_shard_bytes: int,
    names: str,
    merged: bool,
) -> None:
    """Write a Hugging Face directory on rank 0. ``own``: this rank's shards by name.

    All ranks must call it: they send their shards of each tensor. Raises PlanError on all.
    """
    if weights.plan.hub.adapted is not None and not merged:
        what = "peft has wrapped the planned model, and transformers does not know its names"
        fix = "call save_adapters for the adapters alone, or save_merged for a model that transformers loads"
        raise PlanError(what, where="save_pretrained", fix=fix)
    out = outgoing(weights, names, merged=merged)
    files = files_of(out.entries, max_shard_bytes)
    leads = weights.groups.rank == 0
    tensors = made_tensors(files, out.reader(own), leads=leads)
    with agreed(weights.groups, rank_0_is_long=True):
        try:
            if leads:
                write_directory(Path(directory), files, tensors, out.texts)
        except (OSError, PlanError):
            deque(tensors, maxlen=0)  # the other ranks still send their shards
            raise
        deque(tensors, maxlen=0)


@dataclass(frozen=True, slots=True)
class Merge:
    """The merge of adapters into their base. ``mergings``: one for each tensor of the merged base, by name."""

    adapted: Adapted
    mergings: dict[str, Merging]
    is_tied: bool

    @property
    def entries(self) -> list[Entry]:
        return [merging.entry for merging in self.mergings.values()]

    @classmethod
    def of(cls, adapted: Adapted, cast: str | None) -> Merge:
        """Return the merge. ``cast``: dtype of all floating tensors. Raises PlanError if peft cannot merge them."""
        base = merged_without_values(adapted)
        mergings = {merging.entry.name: merging for merging in mergings_of(adapted, base, cast)}
        return cls(adapted, mergings, _is_tied(base))

    def reader(self, entries: Iterable[Entry], read: Read, *, leads: bool = True) -> Read:
        """Return a ``Read`` of the merged base, from a ``read`` of the model's ``entries``."""
        own = by_any_name(entries)

        def full(name: str) -> Tensor | None:
            values = gathered(own, read, self.needed(self.mergings[name]), leads=leads)
            return self.merged(self.mergings[name], values) if leads else None

        return reading_whole(full)

    def needed(self, merging: Merging) -> list[str]:
        """Return the names in the model of the tensors that a merging reads."""
        if not merging.layers:
            return [merging.source] if merging.source else []
        return [f"{path}.{name}" for path, _ in merging.layers for name in _names(self.adapted, path)]

    @torch.no_grad()
    def merged(self, merging: Merging, values: Mapping[str, Tensor]) -> Tensor:
        """Return the merged tensor. ``values``: the needed tensors in full, on the CPU."""
        if not merging.layers:
            assert merging.source is not None, merging.entry
            return values[merging.source]
        result: Tensor | None = None
        for path, name in merging.layers:
            layer, base_names = copy.deepcopy(self.adapted.module.get_submodule(path)), self.adapted.base_names
            # clones: a merge writes in place
            tensors = {own: values[f"{path}.{own}"].clone() for own in _names(self.adapted, path)}
            if result is not None:
                tensors |= {own: result for own in tensors if base_names.get(f"{path}.{own}", "").endswith(name)}
            with held_by(layer, tensors):
                result = _unloaded(layer).state_dict(keep_vars=True)[name].detach()
        assert result is not None, merging.entry
        return result.to(merging.entry.dtype)

    def texts(self, texts: Mapping[str, Any]) -> dict[str, Any]:
        """Return config files by name; config.json without a tie that the merge has undone."""
        if "config.json" not in texts or self.is_tied:
            return dict(texts)
        return {**texts, "config.json": {**texts["config.json"], "tie_word_embeddings": False}}


def merged_without_values(adapted: Adapted) -> nn.Module:
    """Return the base after a merge on the meta device. Raises PlanError if peft cannot merge the adapters."""
    methods = ", ".join(str(config.peft_type.value) for config in adapted.module.peft_config.values())
    fix = "save them by save_adapters; peft loads them beside the base"
    if not hasattr(adapted.module, "merge_and_unload"):
        what = "these adapters add to the base's inputs or activations, not to its weights: they cannot be merged"
        raise PlanError(what, where=methods, fix=fix)
    with refusing("peft cannot merge these adapters", where=methods, fix=fix, of=(Exception,)), torch.no_grad():
        return copy.deepcopy(adapted.module).merge_and_unload()


def mergings_of(adapted: Adapted, base: nn.Module, cast: str | None) -> Iterator[Merging]:
    """Yield a merging for each tensor of the merged base, a tied one once. ``cast``: dtype of all floating tensors."""
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


def _unloaded(layer: Any) -> nn.Module:
    """Return the base's module in a layer of peft, with the active adapters merged as peft's own unloading does."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    layer.merge(safe_merge=False, adapter_names=None)
    return layer.get_base_layer()


def _is_tied(base: Any) -> bool:
    """Return False if input and output embeddings are two tensors, True if they are one or not both there."""
    pair: Sequence[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = [getattr(module, "weight", None) for module in pair]
    return None in weights or weights[0] is weights[1]


def merge_of(save: Path, manifest: Manifest) -> Merge:
    """Return the merge of a save. Raises PlanError, naming the save, if its model cannot be built or merged."""
    adapted = _adapted_in(save, manifest)
    try:
        dtypes = {tensor.values["parameter"] for tensor in manifest.tensors.values() if "parameter" in tensor.values}
        merge = Merge.of(adapted, dtypes.pop() if len(dtypes) == 1 else None)  # if several, the config decides
    except PlanError as error:
        fix = "resume the run with --save-adapters DIR: peft loads them beside the base"
        raise PlanError(error.what, where=str(save), fix=fix) from None
    names = {own for name, tensor in manifest.tensors.items() for own in (name, *tensor.aliases)}
    if absent := [name for merging in merge.mergings.values() for name in merge.needed(merging) if name not in names]:
        raise _refused(save, f"these tensors of transformers' model are not in the save: {listed(absent)}")
    return merge


def _adapted_in(save: Path, manifest: Manifest) -> Adapted:
    assert manifest.adapters is not None
    configs = manifest.adapters.configs
    if [*configs] != [DEFAULT]:
        raise _refused(
            save, f"the save has the adapters {listed(configs)}, and an export merges one that peft has named"
        )
    if "config.json" not in manifest.texts:
        raise _refused(save, "peft has wrapped a model that is none of transformers, which the save alone cannot make")
    try:
        with TemporaryDirectory() as directory:
            model = _model_in(Path(directory), in_its_dtype(manifest.texts)["config.json"], configs[DEFAULT])
    except PlanError as error:
        raise _refused(save, f"the model cannot be made from the save: {error.what}") from None
    of_model = adapted(model)
    assert of_model is not None
    if describe_adapters(of_model)["modules"] != manifest.adapters.modules:
        raise _refused(save, "the layers of peft were changed after they were made, or by another version of peft")
    return of_model


def _model_in(directory: Path, config: object, adapter: object) -> nn.Module:
    """Return the model of both configs, which are written to ``directory``."""
    for name, content in (("config.json", config), (CONFIG, adapter)):
        (directory / name).write_text(json.dumps(content))
    reference = wrapped(f"hf:{directory}", directory / CONFIG)
    try:
        return load_model(reference)
    except PlanError:
        raise
    except Exception:  # some adapters are initialised from the base's values: here any values serve
        return load_model(reference, materialize=True)


def _refused(save: Path, what: str) -> PlanError:
    return PlanError(what, where=str(save), fix=FIX)
