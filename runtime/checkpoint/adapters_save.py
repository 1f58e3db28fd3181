"""The adapters of a model that peft has wrapped, in peft's own files, written by peft itself on rank 0.

    DIR/adapter_model.safetensors, adapter_config.json            the adapter `default`
    DIR/NAME/…                                                    any other

Which tensors a file holds, and under which names, each method of peft decides. So rank 0 gathers the tensors of the
adapters into peft's module, of which the base has no values, and lets it save them: the bytes are those that one
process would write, whatever the layout and the version of peft.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.adapted import Adapted
from planner.capture.model.hub_format import HubFormat
from planner.capture.model.hugging_face import offline
from planner.capture.model.with_adapters import CONFIG
from planner.frozen_plan import Plan
from runtime.checkpoint.atomic_directory import replaced_directory, sync
from runtime.distributed.agreement import agreed
from runtime.distributed.exchange_json import broadcast_json
from runtime.distributed.groups import Groups
from runtime.weights.gather import whole
from runtime.weights.shards import Kept

DEFAULT = "default"
_FILE = re.compile(r"adapter_model.*|adapter_config\.json")


def adapted_of(plan: Plan) -> Adapted:
    """Raises PlanError for a plan of a model without adapters."""
    return adapted_in(plan.hub)


def adapted_in(hub: HubFormat) -> Adapted:
    """Raises PlanError for a model without adapters."""
    found = hub.adapted
    if found is None:
        raise PlanError(
            "the planned model has no adapters of peft, or the plan was loaded from a file",
            where="MODEL",
            fix="plan the model that peft.get_peft_model returns, or add --peft adapter_config.json",
        )
    return found


def directory_of(directory: str | PathLike[str], adapter: str) -> Path:
    return Path(directory) if adapter == DEFAULT else Path(directory) / adapter


def save_adapters(
    plan: Plan, own: Mapping[str, Tensor], groups: Groups, kept: Kept, directory: str | PathLike[str]
) -> None:
    """``own``: this rank's shards by name. The same call on every rank; raises PlanError on all."""
    adapted = adapted_of(plan)
    needed = [name for adapter in adapted.adapters for name in adapted.needed_by(adapter)]
    values = gathered(plan, own, groups, kept, needed)
    with agreed(groups, rank_0_is_long=True):
        if groups.rank == 0:
            for adapter in adapted.adapters:
                _write(adapted, adapter, values, directory_of(directory, adapter))


def gathered(
    plan: Plan, own: Mapping[str, Tensor], groups: Groups, kept: Kept, names: Iterable[str]
) -> dict[str, Tensor]:
    """Full tensors by the model's names on the CPU of rank 0, ``{}`` elsewhere. The same names on every rank."""
    unused = broadcast_json(groups, [*kept.parameters])
    rows = {name: row for row in plan.parameters for name in (row.name, *row.aliases)}
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(names):
        row = rows.get(name)
        if row is not None and row.name not in unused:
            value = whole(row, own, getattr(torch, row.dtype), groups)
        else:
            value = (kept.parameters | kept.buffers)[row.name if row else name] if groups.rank == 0 else None
        if value is not None:
            found[name] = value
    return found


def _write(adapted: Adapted, adapter: str, values: Mapping[str, Tensor], directory: Path) -> None:
    """Raises OSError."""
    with replaced_directory(
        directory, lambda name: _FILE.fullmatch(name) is not None, lambda name: name == CONFIG
    ) as new:
        with (
            adapted.holding({n: values[n] for n in adapted.needed_by(adapter)}) as module,
            offline(),
            warnings.catch_warnings(action="ignore"),
        ):
            module.save_pretrained(str(new), selected_adapters=[adapter])
        (new / "README.md").unlink(missing_ok=True)  # a template, which would replace a text of the user's own
        if adapter != DEFAULT:
            for path in (new / adapter).iterdir():
                path.rename(new / path.name)
            (new / adapter).rmdir()
        for path in new.iterdir():
            sync(path)
