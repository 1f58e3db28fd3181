"""Drawn choices become the values of a spec, and those of the layout that resumes from its save."""

from __future__ import annotations

import copy
from typing import Any

from runtime.fuzz.fields import Choices
from runtime.fuzz.fitting import Facts

CONTINUED, ROWS, LENGTHS, BLOCKS, HALF = "continued on", "rows given", "lengths", "blocks recomputed", "half precision"
NOT_KEYS = frozenset({"microbatches", ROWS, CONTINUED, LENGTHS, BLOCKS, HALF})
_OVERRIDES = {
    "none": {},
    "mlp": {"*.mlp.*": "replicate"},
    "attention": {"*.attention.*": "replicate"},
    "head": {"head": "replicate"},
}
_GROUPS = {"none": {}, "blocks": {"blocks.*": {"lr": 5e-4, "weight_decay": 0.2}}}
_RECOMPUTE = {"first full": {"*0": "full"}, "all but first": {"*": "selective", "*0": "none"}}
_NUMBERED = {"even": "*[02468]", "odd": "*[13579]"}  # the name of a block ends with its number


def spec_of(chosen: Choices, facts: Facts, base: dict[str, Any]) -> dict[str, Any]:
    """The spec as a dict for ``Spec.load``. ``base``: the given keys, with ``inputs``; they take precedence."""
    values = {name: value for name, value in chosen.items() if name not in NOT_KEYS}
    values["batch.global"] = _global_size(chosen, facts)
    values["pipeline.split"] = split_of(chosen, facts)
    if values["precision.parameters"] == "bfloat16":
        values["precision.parameters"] = chosen[HALF]
    kind = values["recompute"]
    values["recompute"] = (
        {_NUMBERED[chosen[BLOCKS]]: kind} if chosen[BLOCKS] in _NUMBERED else _RECOMPUTE.get(str(kind), kind)
    )
    given = values["tensor_parallel.overrides"]
    values["tensor_parallel.overrides"] = _OVERRIDES[given] if isinstance(given, str) else given
    given = values["optimizer.groups"]
    values["optimizer.groups"] = _GROUPS[given] if isinstance(given, str) else given
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = list(value) if isinstance(value, tuple) else value
    return merged(found, with_half(base) if chosen[LENGTHS] == "two" else base)


def with_half(base: dict[str, Any]) -> dict[str, Any]:
    """Sequences of half the length too: of the inputs that have the first one's length, if it has a half."""
    inputs: dict[str, dict[str, Any]] = base["inputs"]
    length = next((given["shape"][0] for given in inputs.values() if given.get("shape")), 0)
    if not isinstance(length, int) or length < 2:
        return base
    several = {
        name: {**given, "shape": [[length // 2, length], *given["shape"][1:]]}
        for name, given in inputs.items()
        if given.get("shape") and given["shape"][0] == length
    }
    return {**base, "inputs": {**inputs, **several}}


def continued_on(spec: dict[str, Any], axis: str) -> dict[str, Any]:
    """The same training on two ranks of ``axis`` (``one``: on one rank), with another state of the optimizer."""
    found = copy.deepcopy(spec)
    size = found["batch"]["global"]
    found["mesh"] = {} if axis == "one" or (axis == "dp" and size % 2) else {axis: 2}
    if size % (found["batch"]["micro"] * (2 if found["mesh"].get("dp") else 1)):
        found["batch"]["micro"] = 1
    found["pipeline"] = {}
    found["cuda_graphs"] = {}
    found["optimizer"] |= {"zero": 3 - found["optimizer"]["zero"], "reshard": "auto"}
    found["optimizer"] |= {"shard_group": None, "bucket_size": None}
    return found


def merged(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """``base`` over ``values``, key by key of each section."""
    found = dict(values)
    for name, value in base.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both and name != "overrides" else value
    return found


def _global_size(chosen: Choices, facts: Facts) -> int:
    if facts.global_size is not None:
        return facts.global_size
    return chosen["microbatches"] * chosen["batch.micro"] * chosen["mesh.dp"]


def split_of(chosen: Choices, facts: Facts) -> Any:
    """uneven: all blocks that are not needed elsewhere on the first stage. ends: embedding and loss count as blocks."""
    num_stages, kind = chosen["mesh.pp"] * chosen["mesh.vpp"], chosen["pipeline.split"]
    first = facts.num_blocks - num_stages + 1
    if num_stages == 1 or kind == "auto" or not isinstance(kind, str) or first < 1:
        return "auto" if isinstance(kind, str) else kind
    if kind == "ends":
        return {"embedding": True, "loss": True}
    counts = [first] + [1] * (num_stages - 1)
    if kind == "layout":
        stages = ["t" * count for count in counts]
        return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    return counts
