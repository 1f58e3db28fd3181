"""Specs that are drawn: every key of the reference spec that changes what runs."""

from __future__ import annotations

from typing import Any

from runtime.fuzz.fields import Choices

FIELDS: dict[str, tuple[Any, ...]] = {
    "mesh.tp": (1, 2, 3, 4),
    "mesh.pp": (1, 2, 3, 4),
    "mesh.dp": (1, 2, 3, 4),
    "mesh.cp": (1, 2),
    "mesh.ep": (1, 2),
    "mesh.etp": (None, 1, 2),
    "mesh.vpp": (1, 2),
    "mesh.order": ("tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep"),
    "microbatches": (2, 1, 3, 4),
    "batch.micro": (2, 1, 3),
    "tensor_parallel.sequence_parallel": (False, True),
    "tensor_parallel.regather": (True, False),
    "tensor_parallel.vocabulary_multiple": (8, 1, 128),
    "pipeline.schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zero_bubble_v"),
    "pipeline.group_size": (None, 2, 3),
    "optimizer.weight_decay": (0.0, 0.1),
    "optimizer.zero": (1, 0),
    "optimizer.clip_grad_norm": (1.0, None, 0.01),
    "optimizer.alignment": ("nccl", "none"),
    "optimizer.bucket_size": (None, 64, 1000),
    "optimizer.ema": (None, 0.9),
    "optimizer.schedule.kind": ("constant", "cosine", "linear"),
    "precision.parameters": ("float64", "float32", "bfloat16"),
    "precision.gradients": (None, "float32"),
    "precision.loss_scale": ("none", 1024.0, "dynamic"),
    "cuda_graphs.impl": ("none", "emulate"),
    "cuda_graphs.scope": ((), ("attn",), ("mlp",), ("attn", "mlp")),
    "recompute": ("none", "full", "selective"),
    "compile": (False, True),
    "dropout": ("fast", "layout_invariant"),
    "initial_weights": ("broadcast", "require_equal"),
    "audit.every": (None, 1),
    "seed": (1234, 7),
}
_AXES = ("mesh.tp", "mesh.pp", "mesh.dp", "mesh.cp")
_RARE = {"compile": 0.97}  # the chance to stay simple, of what takes long


def world_size(chosen: Choices) -> int:
    found = 1
    for axis in _AXES:
        found *= chosen[axis]
    return found


def sensible(chosen: Choices, most_ranks: int, *, has_experts: bool, num_blocks: int) -> Choices:
    """The same without what only tests the spec's own checks: too many ranks, chunks without a pipeline, and so on."""
    found = dict(chosen)
    for axis in ("mesh.cp", "mesh.dp", "mesh.pp", "mesh.tp"):
        while world_size(found) > most_ranks and found[axis] > 1:
            found[axis] -= 1
    while found["mesh.pp"] > num_blocks:
        found["mesh.pp"] -= 1
    if found["mesh.pp"] == 1:
        found |= {"mesh.vpp": 1, "pipeline.schedule": "1f1b", "pipeline.group_size": None}
    if found["pipeline.schedule"] == "interleaved_1f1b" or found["mesh.vpp"] > 1:
        found |= {"mesh.vpp": 2, "pipeline.schedule": "interleaved_1f1b"}
    else:
        found["pipeline.group_size"] = None
    if found["pipeline.schedule"] == "zero_bubble_v":
        found["mesh.vpp"] = 2
    if found["mesh.pp"] * found["mesh.vpp"] > num_blocks:
        found |= {"mesh.vpp": 1, "pipeline.schedule": "1f1b", "pipeline.group_size": None}
    if found["precision.parameters"] == "float64":
        found["precision.gradients"] = None  # else gradients are rounded more coarsely than they are compared
    if found["cuda_graphs.impl"] == "none":
        found["cuda_graphs.scope"] = ()
    etp = found["mesh.etp"] or found["mesh.tp"]
    if not has_experts or world_size(found) % (etp * found["mesh.ep"] * found["mesh.pp"]):
        found |= {"mesh.ep": 1, "mesh.etp": None}
    if found["mesh.ep"] > 1 or found["mesh.etp"] is not None or found["mesh.cp"] > 1:
        found["mesh.order"] = FIELDS["mesh.order"][0]  # another one must suit dense layers and experts
    return found


def spec_of(chosen: Choices, inputs: dict[str, Any]) -> dict[str, Any]:
    """The spec as a dict for ``Spec.load``; nothing of it is at its default by omission but what has no field here."""
    values = {name: value for name, value in chosen.items() if name != "microbatches"}
    values["batch.global"] = chosen["microbatches"] * chosen["batch.micro"] * chosen["mesh.dp"]
    found: dict[str, Any] = {"inputs": inputs}
    for name, value in values.items():
        *sections, key = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = list(value) if isinstance(value, tuple) else value
    if found["optimizer"]["schedule"]["kind"] != "constant":
        found["optimizer"]["schedule"]["steps"] = 10
    found["optimizer"]["lr"] = 1e-3
    if found["cuda_graphs"]["impl"] == "emulate":
        found["cuda_graphs"]["warmup_steps"] = 1
    return found
