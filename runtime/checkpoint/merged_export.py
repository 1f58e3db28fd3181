"""A save of a model that peft has wrapped, exported as its base with the adapter merged: without a launch.

    configs of the base and the adapter, both in the save -> modules of transformers and peft, without values
    for each tensor of the base:   its parts in the save -> peft's merge of that layer -> file

Only a base of transformers can be made from the save alone, and only adapters that are as peft makes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.adapted import Adapted, adapted
from planner.capture.model.describe_adapters import describe_adapters
from planner.capture.model.hub_format import in_its_dtype
from planner.capture.model.reference import load_model
from planner.capture.model.with_adapters import CONFIG, named
from runtime.checkpoint.adapters_save import DEFAULT
from runtime.checkpoint.assembled import Read
from runtime.checkpoint.hub_names import reading_whole
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.merged_save import Merge
from runtime.checkpoint.safetensors_files import listed

FIX = (
    "resume the run with --save-merged DIR or --save-adapters DIR; in Python: engine.load(DIR), then engine.save_merged"
)


def merge_of(save: Path, manifest: Manifest) -> Merge:
    """Raises PlanError, naming the save, if the model cannot be made from it, or its adapters cannot be merged."""
    found = _adapted_in(save, manifest)
    try:
        merge = Merge.of(found, _only_dtype(manifest))
    except PlanError as error:
        fix = "resume the run with --save-adapters DIR: peft loads them beside the base"
        raise PlanError(error.what, where=str(save), fix=fix) from None
    names = _saved_names(manifest)
    if absent := [name for merging in merge.mergings.values() for name in merge.needed(merging) if name not in names]:
        raise _refused(save, f"these tensors of transformers' model are not in the save: {listed(absent)}")
    return merge


def read_merged(merge: Merge, manifest: Manifest, values_of: Callable[[str], Tensor]) -> Read:
    """``values_of``: a full tensor by its name in the save."""
    names = _saved_names(manifest)

    def full(name: str) -> Tensor:
        merging = merge.mergings[name]
        return merge.merged(merging, {own: values_of(names[own]) for own in dict.fromkeys(merge.needed(merging))})

    return reading_whole(full)


def _saved_names(manifest: Manifest) -> dict[str, str]:
    """Each name of a tensor → the one in the save."""
    return {own: name for name, tensor in manifest.tensors.items() for own in (name, *tensor.aliases)}


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
    found = adapted(model)
    assert found is not None
    if describe_adapters(found)["modules"] != manifest.adapters.modules:
        raise _refused(save, "the layers of peft were changed after they were made, or by another version of peft")
    return found


def _model_in(directory: Path, config: object, adapter: object) -> nn.Module:
    """``directory`` gets both configs."""
    for name, content in (("config.json", config), (CONFIG, adapter)):
        (directory / name).write_text(json.dumps(content))
    reference = named(f"hf:{directory}", directory / CONFIG)
    try:
        return load_model(reference)
    except PlanError:
        raise
    except Exception:  # an adapter that begins as a function of the base's values: of any values here
        return load_model(reference, materialize=True)


def _only_dtype(manifest: Manifest) -> str | None:
    """That of all parameters; None if there are several, and the config decides."""
    found = {tensor.values["parameter"] for tensor in manifest.tensors.values() if "parameter" in tensor.values}
    return found.pop() if len(found) == 1 else None


def _refused(save: Path, what: str) -> PlanError:
    return PlanError(what, where=str(save), fix=FIX)
