"""The adapters of a model that peft has wrapped, in peft's own files, written by peft itself on rank 0.

    DIR/adapter_model.safetensors, adapter_config.json            the adapter `default`
    DIR/NAME/…                                                    any other

Each method of peft decides which tensors a file holds, and under which names. Rank 0 therefore gathers the tensors of
the adapters into peft's module, with a base without values, and peft saves them: the bytes are those that one process
would write, for any layout and version of peft.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.assembly import Source
from planner.capture.model.hub_format import Adapted, HubFormat, held_by
from planner.capture.model.hugging_face import offline
from planner.capture.model.reference import CONFIG
from planner.files.text import read_json
from planner.frozen_plan import Plan
from runtime.checkpoint.atomic_directory import replaced_directory, sync
from runtime.checkpoint.hub_tensors import by_any_name, gathered
from runtime.checkpoint.pretrained_load import read_all
from runtime.checkpoint.pretrained_save import entries_of, reader_of
from runtime.checkpoint.safetensors_files import SafetensorsFiles, listed, require_fit
from runtime.distributed.agreement import agreed, halfway
from runtime.weights.shards import RankWeights

DEFAULT = "default"
_FILE = re.compile(r"adapter_model.*|adapter_config\.json")
# settings about the origin or the training of an adapter, which do not change its results
_OF_ORIGIN = frozenset(
    {"inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type"}
    | {"lora_dropout", "module_dropout", "rank_dropout", "init_weights", "init_lora_weights", "low_cpu_mem_usage"}
)
_FIX = "load an adapter of this base and config, or plan the base with the adapter's own adapter_config.json"


def adapted_in(hub: HubFormat) -> Adapted:
    """Return the adapters of the planned model. Raises PlanError if there are none."""
    if hub.adapted is None:
        what = "the planned model has no adapters of peft, or the plan was loaded from a file"
        fix = "plan the model that peft.get_peft_model returns, or add --peft adapter_config.json"
        raise PlanError(what, where="MODEL", fix=fix)
    return hub.adapted


def directory_of(directory: str | PathLike[str], adapter: str) -> Path:
    return Path(directory) if adapter == DEFAULT else Path(directory) / adapter


def save_adapters(weights: RankWeights, own: Mapping[str, Tensor], directory: str | PathLike[str]) -> None:
    """Write the adapters. ``own``: this rank's shards by name. All ranks must call it; raises PlanError on all."""
    adapted, entries, leads = adapted_in(weights.plan.hub), entries_of(weights), weights.groups.rank == 0
    needed = [name for adapter in adapted.adapters for name in adapted.needed_by(adapter)]
    values = gathered(by_any_name(entries), reader_of(entries, own, weights), needed, leads=leads)
    with agreed(weights.groups, rank_0_is_long=True):
        if leads:
            for adapter in adapted.adapters:
                _write(adapted, adapter, values, directory_of(directory, adapter))


def _write(adapted: Adapted, adapter: str, values: Mapping[str, Tensor], directory: Path) -> None:
    """Write one adapter to ``directory``. Raises OSError."""
    with replaced_directory(
        directory, lambda name: _FILE.fullmatch(name) is not None, lambda name: name == CONFIG
    ) as new:
        with (
            held_by(adapted.module, {n: values[n] for n in adapted.needed_by(adapter)}),
            offline(),
            warnings.catch_warnings(action="ignore"),
        ):
            adapted.module.save_pretrained(str(new), selected_adapters=[adapter])
        (new / "README.md").unlink(missing_ok=True)  # a template, which would replace a README of the user
        if adapter != DEFAULT:
            for path in (new / adapter).iterdir():
                path.rename(new / path.name)
            (new / adapter).rmdir()
        for path in new.iterdir():
            sync(path)


def load_adapters(weights: RankWeights, directory: str | PathLike[str], bring: Callable[[str], None]) -> None:
    """Fill this rank's parts of the adapters. All ranks must call it; on an error, no rank has changed.

    ``bring(name)`` is called before the weights of a parameter are replaced. Raises PlanError on every rank, naming
    file and tensor.
    """
    adapted, groups = adapted_in(weights.plan.hub), weights.groups
    with ExitStack() as stack:
        with agreed(groups):
            places = {adapter: directory_of(directory, adapter) for adapter in adapted.adapters}
            opened = {
                adapter: stack.enter_context(_opened(adapted, adapter, place)) for adapter, place in places.items()
            }
            sources = {adapter: find(files, weights.plan, adapted, adapter) for adapter, files in opened.items()}
        with halfway(groups, "the adapters are"):
            for adapter, files in opened.items():
                read_all(files, sources[adapter], weights, bring)


def check_adapters(plan: Plan, directory: str | PathLike[str]) -> None:
    """Raise PlanError, naming file and tensor, unless ``directory`` holds the adapters of the planned model."""
    adapted = adapted_in(plan.hub)
    for adapter in adapted.adapters:
        with _opened(adapted, adapter, directory_of(directory, adapter)) as files:
            find(files, plan, adapted, adapter)


def _opened(adapted: Adapted, adapter: str, place: Path) -> SafetensorsFiles:
    check_config(adapted, adapter, place)
    return SafetensorsFiles(place)


def check_config(adapted: Adapted, adapter: str, directory: Path) -> None:
    """Raise PlanError unless the config in ``directory`` matches the planned adapter and the planned base."""
    file = directory / CONFIG
    config = read_json(
        file, "adapter config", fix="give a directory that peft's save_pretrained or save_adapters wrote"
    )
    if not isinstance(config, dict):
        raise PlanError(f"{CONFIG} is no adapter config", where=str(file), fix=_FIX)
    planned = adapted.config_of(adapter)
    bases = [str(each.get("base_model_name_or_path") or "").rstrip("/") for each in (config, planned)]
    if all(bases) and Path(bases[0]).name != Path(bases[1]).name:
        what = f"the adapter was trained on the base {bases[0]}, the planned model is {bases[1]}"
        raise PlanError(what, where=str(file), fix=_FIX)
    for key, value in planned.items():
        if key not in _OF_ORIGIN and key in config and _plain(config[key]) != _plain(value):
            what = f"the adapter has {key}: {_plain(config[key])}, the planned one {_plain(value)}"
            raise PlanError(what, where=str(file), fix=_FIX)


def _plain(value: Any) -> Any:
    """Return a value with lists of names sorted: peft treats them as sets."""
    if isinstance(value, (list, tuple, set)) and all(isinstance(part, str) for part in value):
        return sorted(value)
    return value


def find(files: SafetensorsFiles, plan: Plan, adapted: Adapted, adapter: str) -> dict[str, Source]:
    """Return name in the model → tensor in the file. Raises one PlanError that lists all tensors that do not fit."""
    names = adapted.files_of(adapter)
    if computed := [stored for stored, name in names.items() if name is None]:
        what = f"peft saves only the result of the module that makes {listed(computed)}, not its weights"
        raise PlanError(what, where=str(files.directory), fix="resume from a training state (engine.load, --resume)")
    shapes = {name: list(value.shape) for name, value in adapted.module.state_dict(keep_vars=True).items()}
    wrong = [
        f"{stored} has shape {list(files.tensors[stored].shape)}, the model has {shapes[name]}"
        for stored, name in names.items()
        if name and stored in files.tensors and list(files.tensors[stored].shape) != shapes[name]
    ]
    absent = [stored for stored in names if stored not in files.tensors]
    extra = [stored for stored in files.tensors if stored not in names]
    what, lists = "the adapter does not fit the planned model", {"absent": absent, "unexpected": extra}
    require_fit(what, lists, wrong, where=str(files.directory), fix=_FIX)
    first = {name: row.name for row in plan.parameters for name in (row.name, *row.aliases)}
    return {first.get(name, name): files.source(stored) for stored, name in names.items() if name}
