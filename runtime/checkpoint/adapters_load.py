"""Load adapters that peft or an engine wrote: every rank reads its slices, and nothing is written before all is right.

adapter_config.json            of the planned method, with the same settings, for the same base
adapter_model.safetensors      exactly the tensors that peft would save for this model, with these shapes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from passes.stage_module import StageModule
from planner.capture.hub.assembly import Source
from planner.capture.model.adapted import Adapted
from planner.capture.model.with_adapters import CONFIG
from planner.files.json_text import read_json
from planner.frozen_plan import Plan
from runtime.checkpoint.adapters_save import adapted_of, directory_of
from runtime.checkpoint.pretrained_load import read_all
from runtime.checkpoint.safetensors_files import SafetensorsFiles, listed
from runtime.distributed.agreement import agreed, halfway
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept

# Settings that say where an adapter comes from, or how it began and was trained: not what it computes.
_OF_ORIGIN = frozenset(
    {"inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type"}
    | {"lora_dropout", "module_dropout", "rank_dropout", "init_weights", "init_lora_weights", "low_cpu_mem_usage"}
)
_FIX = "load an adapter of this base and config, or plan the base with the adapter's own adapter_config.json"


def load_adapters(
    plan: Plan,
    stages: Sequence[StageModule],
    groups: Groups,
    kept: Kept,
    directory: str | PathLike[str],
    bring: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill this rank's parts of the adapters. The same call on every rank; all succeed or none has changed.

    ``bring(name)`` is called before the weights of a parameter are replaced. Raises PlanError on every rank, naming
    file and tensor.
    """
    adapted = adapted_of(plan)
    with ExitStack() as stack:
        with agreed(groups):
            places = {adapter: directory_of(directory, adapter) for adapter in adapted.adapters}
            opened = {
                adapter: stack.enter_context(_opened(adapted, adapter, place)) for adapter, place in places.items()
            }
            found = {adapter: find(files, plan, adapted, adapter) for adapter, files in opened.items()}
        with halfway(groups, "the adapters are"):
            for adapter, files in opened.items():
                read_all(files, found[adapter], stages, groups, kept, bring)


def check_adapters(plan: Plan, directory: str | PathLike[str]) -> None:
    """Raise PlanError, naming file and tensor, unless ``directory`` holds the adapters of the planned model."""
    adapted = adapted_of(plan)
    for adapter in adapted.adapters:
        with _opened(adapted, adapter, directory_of(directory, adapter)) as files:
            find(files, plan, adapted, adapter)


def _opened(adapted: Adapted, adapter: str, place: Path) -> SafetensorsFiles:
    check_config(adapted, adapter, place)
    return SafetensorsFiles(place)


def check_config(adapted: Adapted, adapter: str, directory: Path) -> None:
    """Raise PlanError unless the config in ``directory`` is that of the planned adapter, for the planned base."""
    file = directory / CONFIG
    given = read_json(file, "adapter config", fix="give a directory that peft's save_pretrained or save_adapters wrote")
    if not isinstance(given, dict):
        raise PlanError(f"{CONFIG} is no adapter config", where=str(file), fix=_FIX)
    planned = adapted.config_of(adapter)
    bases = [str(config.get("base_model_name_or_path") or "").rstrip("/") for config in (given, planned)]
    if all(bases) and Path(bases[0]).name != Path(bases[1]).name:
        raise PlanError(
            f"the adapter was trained on the base {bases[0]}, the planned model is {bases[1]}",
            where=str(file),
            fix=_FIX,
        )
    for key, value in planned.items():
        if key not in _OF_ORIGIN and key in given and _plain(given[key]) != _plain(value):
            raise PlanError(
                f"the adapter has {key}: {_plain(given[key])}, the planned one {_plain(value)}",
                where=str(file),
                fix=_FIX,
            )


def _plain(value: Any) -> Any:
    """Lists of names as sets: peft keeps them so."""
    if isinstance(value, (list, tuple, set)) and all(isinstance(part, str) for part in value):
        return sorted(value)
    return value


def find(files: SafetensorsFiles, plan: Plan, adapted: Adapted, adapter: str) -> dict[str, Source]:
    """Name in the model → the file's tensor. Raises one PlanError that lists all that does not fit."""
    names = adapted.files_of(adapter)
    if computed := [stored for stored, name in names.items() if name is None]:
        raise PlanError(
            f"peft saves only the result of the module that makes {listed(computed)}, not its weights",
            where=str(files.directory),
            fix="resume from a training state (engine.load, --resume)",
        )
    shapes = {name: list(value.shape) for name, value in adapted.module.state_dict(keep_vars=True).items()}
    problems = [
        f"{stored} has shape {list(files.tensors[stored].shape)}, the model has {shapes[name]}"
        for stored, name in names.items()
        if name and stored in files.tensors and list(files.tensors[stored].shape) != shapes[name]
    ][:1]
    if absent := [stored for stored in names if stored not in files.tensors]:
        problems.append(f"absent: {listed(absent)}")
    if extra := [stored for stored in files.tensors if stored not in names]:
        problems.append(f"unexpected: {listed(extra)}")
    if problems:
        raise PlanError(
            f"the adapter does not fit the planned model: {'; '.join(problems)}", where=str(files.directory), fix=_FIX
        )
    first = {name: row.name for row in plan.parameters for name in (row.name, *row.aliases)}
    return {first.get(name, name): files.source(stored) for stored, name in names.items() if name}
