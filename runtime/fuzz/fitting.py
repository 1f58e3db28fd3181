"""Remove choices that would test only the checks of the spec: too many ranks, chunks without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from planner.pipeline.schedule import KINDS, default_kind
from planner.spec.update_rules import keys_read
from runtime.fuzz.fields import Choices
from runtime.fuzz.specs import FIELDS

_AXES = ("mesh.tp", "mesh.pp", "mesh.dp", "mesh.cp")
_NO_PIPELINE = {
    "mesh.vpp": 1,
    "pipeline.schedule": default_kind(1),
    "pipeline.group_size": None,
    "pipeline.split": "auto",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a model that its spec must respect. ``global_size``: sequences of a step; None if the spec's fields
    say. ``is_steady``: its routers choose the same experts however scores are rounded.
    """

    num_blocks: int
    has_experts: bool
    global_size: int | None = None
    is_steady: bool = False


def world_size(chosen: Choices) -> int:
    found = 1
    for axis in _AXES:
        found *= chosen[axis]
    return found


def sensible(chosen: Choices, most_ranks: int, facts: Facts, pinned: Choices) -> Choices:
    """``pinned``: fields that stay."""
    found = chosen | pinned
    _fit_ranks(found, most_ranks, facts, pinned)
    _fit_pipeline(found, facts)
    _fit_experts(found, facts)
    if facts.has_experts and not facts.is_steady and found["precision.parameters"] == "bfloat16":
        found["precision.parameters"] = "float32"  # rounded scores choose other experts
    if found["precision.parameters"] != "bfloat16":
        found["half precision"] = "bfloat16"
    if found["precision.parameters"] == "float64":
        found["precision.gradients"] = None  # else gradients are rounded more coarsely than they are compared
    if found["mesh.dp"] == 1:
        found["rows given"] = "all"
    if found["cuda_graphs.impl"] == "none":
        found |= {"cuda_graphs.scope": (), "cuda_graphs.warmup_steps": 1}
    if found["recompute"] not in ("full", "selective") or facts.num_blocks == 1:
        found["blocks recomputed"] = "all"
    if found["audit.every"] is None:
        found["audit.on_difference"] = "stop"
    if found["optimizer.schedule.kind"] == "constant":
        found |= {"optimizer.schedule.steps": 10, "optimizer.schedule.min_lr": 0.0}
    _fit_optimizer(found)
    if not found["tensor_parallel.sequence_parallel"]:
        found["tensor_parallel.regather"] = True
    return found | pinned


def _fit_optimizer(found: Choices) -> None:
    """Only keys that the update rule reads."""
    read = keys_read(found["optimizer.name"])
    for key in ("betas", "eps", "momentum", "nesterov"):
        name = f"optimizer.{key}"
        if key not in read:
            found[name] = FIELDS[name][0]
    if not found["optimizer.momentum"]:
        found["optimizer.nesterov"] = None
    if found["cuda_graphs.impl"] != "none" and found["optimizer.zero"] > 1:
        found["optimizer.zero"] -= 2
    if found["optimizer.zero"] != 3:
        found["optimizer.reshard"] = "auto"
    if found["mesh.dp"] * found["mesh.cp"] % 4 or not found["optimizer.zero"]:
        found["optimizer.shard_group"] = None


def _fit_ranks(found: Choices, most_ranks: int, facts: Facts, pinned: Choices) -> None:
    for axis in ("mesh.cp", "mesh.dp", "mesh.pp", "mesh.tp"):
        while axis not in pinned and world_size(found) > most_ranks and found[axis] > 1:
            found[axis] -= 1
    while "mesh.pp" not in pinned and found["mesh.pp"] > max(1, facts.num_blocks):
        found["mesh.pp"] -= 1
    size = facts.global_size
    while size is not None and size % (found["mesh.dp"] * found["batch.micro"]):
        name = "mesh.dp" if "mesh.dp" not in pinned and found["mesh.dp"] > 1 else "batch.micro"
        if name in pinned or found[name] == 1:
            break  # the planner says which of the pinned keys do not go together
        found[name] -= 1


def _fit_pipeline(found: Choices, facts: Facts) -> None:
    if found["mesh.pp"] == 1:
        found |= _NO_PIPELINE
    kind = KINDS[found["pipeline.schedule"]]
    if found["mesh.vpp"] > 1 or (kind.runs_chunks and kind.vpp is None):
        found |= {"mesh.vpp": 2, "pipeline.schedule": default_kind(2)}
    else:
        found |= {"mesh.vpp": kind.vpp or 1, "pipeline.group_size": None}
    if found["mesh.pp"] * found["mesh.vpp"] > facts.num_blocks:
        found |= _NO_PIPELINE


def _fit_experts(found: Choices, facts: Facts) -> None:
    etp = found["mesh.etp"] or found["mesh.tp"]
    if not facts.has_experts or world_size(found) % (etp * found["mesh.ep"] * found["mesh.pp"]):
        found |= {"mesh.ep": 1, "mesh.etp": None}
    if found["mesh.ep"] > 1 or found["mesh.etp"] is not None or found["mesh.cp"] > 1:
        found["mesh.order"] = FIELDS["mesh.order"][0]  # another one must suit dense layers and experts
    if not facts.has_experts and found["cuda_graphs.scope"] in (("moe",), ("moe_router",)):
        found["cuda_graphs.scope"] = ()
