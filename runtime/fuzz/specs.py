"""Random specs: an option for each key of the reference spec that changes a step.

FIELDS    the options of each field, the simplest first
draw      draws every field independently: the simplest option with a given probability, else any
simpler   all ways to replace one field's option by a simpler one
sensible  replaces choices that would only test the checks of the spec (too many ranks, chunks without a pipeline)
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

from planner.pipeline.kinds import KINDS, default_kind
from planner.spec.update_rules import keys_read

Options = Mapping[str, tuple[Any, ...]]
Choices = dict[str, Any]
AXES = ("tp", "pp", "dp", "cp")
ORDERS = ("tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep")
FIELDS: dict[str, tuple[Any, ...]] = {
    "mesh.tp": (1, 2, 3, 4),
    "mesh.pp": (1, 2, 3, 4),
    "mesh.dp": (1, 2, 3, 4),
    "mesh.cp": (1, 2),
    "mesh.ep": (1, 2),
    "mesh.etp": (None, 1, 2),
    "mesh.vpp": (1, 2),
    "mesh.order": ORDERS,
    "microbatches": (2, 1, 3, 4),
    "batch.micro": (2, 1, 3),
    "tensor_parallel.sequence_parallel": (False, True),
    "tensor_parallel.regather": (True, False),
    "tensor_parallel.overrides": ("none", "mlp", "attention", "head"),
    "tensor_parallel.vocabulary_multiple": (8, 1, 128),
    "pipeline.schedule": tuple(dict.fromkeys((default_kind(1), *KINDS))),
    "pipeline.split": ("auto", "uneven", "ends", "layout"),
    "pipeline.group_size": (None, 2, 3),
    "optimizer.name": ("adamw", "adam", "sgd", "adagrad"),
    "optimizer.lr": (1e-3, 1e-2),
    "optimizer.momentum": (None, 0.9),
    "optimizer.nesterov": (None, True),
    "optimizer.betas": ((0.9, 0.95), (0.5, 0.9)),
    "optimizer.eps": (1e-8, 1e-3),
    "optimizer.weight_decay": (0.0, 0.1),
    "optimizer.no_decay": ("none", "vectors"),
    "optimizer.groups": ("none", "blocks"),
    "optimizer.zero": (1, 0, 2, 3),
    "optimizer.reshard": ("auto", False, 1),
    "optimizer.shard_group": (None, 2),
    "optimizer.clip_grad_norm": (1.0, None, 0.01),
    "optimizer.alignment": ("nccl", "none"),
    "optimizer.bucket_size": (None, 64, 1000),
    "optimizer.ema": (None, 0.9),
    "optimizer.schedule.kind": ("constant", "cosine", "linear"),
    "optimizer.schedule.warmup": (0, 1),
    "optimizer.schedule.steps": (10, 4),
    "optimizer.schedule.min_lr": (0.0, 1e-5),
    "precision.parameters": ("float64", "float32", "bfloat16"),
    "half precision": ("bfloat16", "float16"),
    "precision.gradients": (None, "float32"),
    "precision.loss_scale": ("none", 1024.0, "dynamic"),
    "precision.nonfinite": (None, "skip"),
    "cuda_graphs.impl": ("none", "emulate"),
    "cuda_graphs.scope": ((), ("attn",), ("mlp",), ("attn", "mlp"), ("moe",), ("moe_router",), ("full_iteration",)),
    "cuda_graphs.warmup_steps": (1, 2),
    "recompute": ("none", "full", "selective", "first full", "all but first"),
    "blocks recomputed": ("all", "even", "odd"),
    "compile": (False, True),
    "fuse_norms": (False, True),
    "dropout": ("fast", "layout_invariant"),
    "initial_weights": ("broadcast", "require_equal"),
    "audit.every": (None, 1),
    "audit.on_difference": ("stop", "warn"),
    "seed": (1234, 7),
    "rows given": ("all", "own"),
    "lengths": ("one", "two"),
    "continued on": ("nothing", "one", "tp", "pp", "dp", "cp"),
}
RARE = {
    "compile": 0.97,
    "precision.parameters": 0.3,
    "lengths": 0.5,
}  # probability that a drawn option becomes the simplest after all: it is slow, or hides differences
# Fields on which a capture, and the weights of the user's own model, depend: all cases of one model share them.
OF_CAPTURES = ("batch.micro", "precision.parameters", "half precision", "dropout", "seed")
_AXES = tuple(f"mesh.{axis}" for axis in AXES)
_NO_PIPELINE = {
    "mesh.vpp": 1,
    "pipeline.schedule": default_kind(1),
    "pipeline.group_size": None,
    "pipeline.split": "auto",
}
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


def draw(options: Options, seed: int | str, *, simplest: float = 0.5) -> Choices:
    """Draw an option of each field. ``simplest``: the probability of its first option."""
    randoms = {name: Random(f"{seed}/{name}") for name in options}
    return {n: v[0] if randoms[n].random() < simplest else randoms[n].choice(v) for n, v in options.items()}


def simpler(chosen: Choices, options: Options) -> Iterator[Choices]:
    """Yield choices with one simpler option: the first option of each field, then the others from simple to complex."""
    positions = {name: options[name].index(value) for name, value in chosen.items() if name in options}
    most = max(positions.values(), default=0)
    for at in range(most):
        for name, position in positions.items():
            if at < position:
                yield {**chosen, name: options[name][at]}


def told(chosen: Choices, options: Options) -> str:
    """Return the fields without their simplest option, as ``name value``."""
    names = [f"{n} {chosen[n]}" for n, values in options.items() if n in chosen and chosen[n] != values[0]]
    return ", ".join(names) or "only defaults"


def listed(values: dict[str, Any], options: Options) -> Choices:
    """Return the choices in a file. Raises ValueError if a field or an option is missing or unknown."""
    chosen = {name: tuple(v) if isinstance(v := values[name], list) else v for name in options}
    if values.keys() != options.keys() or any(chosen[name] not in options[name] for name in options):
        raise ValueError
    return chosen


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a model that its spec must respect. ``global_size``: sequences of a step; None: from the fields of
    the spec. ``is_steady``: rounding of scores does not change the experts that routers choose.
    """

    num_blocks: int
    has_experts: bool
    global_size: int | None = None
    is_steady: bool = False


def world_size(chosen: Choices) -> int:
    return prod(chosen[axis] for axis in _AXES)


def sensible(chosen: Choices, most_ranks: int, facts: Facts, pinned: Choices) -> Choices:
    """Return choices that a plan accepts, for at most ``most_ranks`` ranks. ``pinned``: fields with a fixed value."""
    choices = chosen | pinned
    _fit_ranks(choices, most_ranks, facts, pinned)
    _fit_pipeline(choices, facts)
    _fit_experts(choices, facts)
    if facts.has_experts and not facts.is_steady and choices["precision.parameters"] == "bfloat16":
        choices["precision.parameters"] = "float32"  # rounding would change the chosen experts
    if choices["precision.parameters"] != "bfloat16":
        choices["half precision"] = "bfloat16"
    if choices["precision.parameters"] == "float64":
        choices["precision.gradients"] = None  # else gradients are rounded more than the tolerance allows
    if choices["mesh.dp"] == 1:
        choices["rows given"] = "all"
    if choices["cuda_graphs.impl"] == "none":
        choices |= {"cuda_graphs.scope": (), "cuda_graphs.warmup_steps": 1}
    if choices["recompute"] not in ("full", "selective") or facts.num_blocks == 1:
        choices["blocks recomputed"] = "all"
    if choices["audit.every"] is None:
        choices["audit.on_difference"] = "stop"
    if choices["optimizer.schedule.kind"] == "constant":
        choices |= {"optimizer.schedule.steps": 10, "optimizer.schedule.min_lr": 0.0}
    _fit_optimizer(choices)
    if not choices["tensor_parallel.sequence_parallel"]:
        choices["tensor_parallel.regather"] = True
    return choices | pinned


def _fit_optimizer(choices: Choices) -> None:
    """Reset keys that the update rule does not read, and combinations that ZeRO does not allow."""
    read = keys_read(choices["optimizer.name"])
    for key in ("betas", "eps", "momentum", "nesterov"):
        name = f"optimizer.{key}"
        if key not in read:
            choices[name] = FIELDS[name][0]
    if not choices["optimizer.momentum"]:
        choices["optimizer.nesterov"] = None
    if choices["cuda_graphs.impl"] != "none" and choices["optimizer.zero"] > 1:
        choices["optimizer.zero"] -= 2
    if choices["optimizer.zero"] != 3:
        choices["optimizer.reshard"] = "auto"
    if choices["mesh.dp"] * choices["mesh.cp"] % 4 or not choices["optimizer.zero"]:
        choices["optimizer.shard_group"] = None


def _fit_ranks(choices: Choices, most_ranks: int, facts: Facts, pinned: Choices) -> None:
    for axis in ("mesh.cp", "mesh.dp", "mesh.pp", "mesh.tp"):
        while axis not in pinned and world_size(choices) > most_ranks and choices[axis] > 1:
            choices[axis] -= 1
    while "mesh.pp" not in pinned and choices["mesh.pp"] > max(1, facts.num_blocks):
        choices["mesh.pp"] -= 1
    size = facts.global_size
    while size is not None and size % (choices["mesh.dp"] * choices["batch.micro"]):
        name = "mesh.dp" if "mesh.dp" not in pinned and choices["mesh.dp"] > 1 else "batch.micro"
        if name in pinned or choices[name] == 1:
            break  # the planner reports which of the pinned keys conflict
        choices[name] -= 1


def _fit_pipeline(choices: Choices, facts: Facts) -> None:
    if choices["mesh.pp"] == 1:
        choices |= _NO_PIPELINE
    kind = KINDS.get(str(choices["pipeline.schedule"]))
    if kind is None:  # an order written by the user
        return
    if choices["mesh.vpp"] > 1 or (kind.runs_chunks and kind.vpp is None):
        choices |= {"mesh.vpp": 2, "pipeline.schedule": default_kind(2)}
    else:
        choices |= {"mesh.vpp": kind.vpp or 1, "pipeline.group_size": None}
    if choices["mesh.pp"] * choices["mesh.vpp"] > facts.num_blocks:
        choices |= _NO_PIPELINE


def _fit_experts(choices: Choices, facts: Facts) -> None:
    etp = choices["mesh.etp"] or choices["mesh.tp"]
    if not facts.has_experts or world_size(choices) % (etp * choices["mesh.ep"] * choices["mesh.pp"]):
        choices |= {"mesh.ep": 1, "mesh.etp": None}
    if choices["mesh.ep"] > 1 or choices["mesh.etp"] is not None or choices["mesh.cp"] > 1:
        choices["mesh.order"] = FIELDS["mesh.order"][0]  # another order need not fit both dense layers and experts
    if not facts.has_experts and choices["cuda_graphs.scope"] in (("moe",), ("moe_router",)):
        choices["cuda_graphs.scope"] = ()


def spec_of(chosen: Choices, facts: Facts, base: dict[str, Any]) -> dict[str, Any]:
    """Return the spec as a dict for ``Spec.load``. ``base``: fixed keys, with ``inputs``, which take precedence."""
    values = {name: value for name, value in chosen.items() if name not in NOT_KEYS}
    values["batch.global"] = facts.global_size or chosen["microbatches"] * chosen["batch.micro"] * chosen["mesh.dp"]
    values["pipeline.split"] = split_of(chosen, facts)
    if values["precision.parameters"] == "bfloat16":
        values["precision.parameters"] = chosen[HALF]
    kind = values["recompute"]
    values["recompute"] = (
        {_NUMBERED[chosen[BLOCKS]]: kind} if chosen[BLOCKS] in _NUMBERED else _RECOMPUTE.get(str(kind), kind)
    )
    for name, table in (("tensor_parallel.overrides", _OVERRIDES), ("optimizer.groups", _GROUPS)):
        values[name] = table[values[name]] if isinstance(values[name], str) else values[name]
    spec: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        place = spec
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = list(value) if isinstance(value, tuple) else value
    return merged(spec, with_half(base) if chosen[LENGTHS] == "two" else base)


def with_half(base: dict[str, Any]) -> dict[str, Any]:
    """Add half the sequence length to all inputs with the length of the first one, if it is 2 or more."""
    inputs: dict[str, dict[str, Any]] = base["inputs"]
    length = next((field["shape"][0] for field in inputs.values() if field.get("shape")), 0)
    if not isinstance(length, int) or length < 2:
        return base
    several = {
        name: {**field, "shape": [[length // 2, length], *field["shape"][1:]]}
        for name, field in inputs.items()
        if field.get("shape") and field["shape"][0] == length
    }
    return {**base, "inputs": {**inputs, **several}}


def continued_on(spec: dict[str, Any], axis: str) -> dict[str, Any]:
    """Return the spec of the same training on two ranks of ``axis`` (``one``: one rank), with another ZeRO stage."""
    continued = copy.deepcopy(spec)
    size = continued["batch"]["global"]
    continued["mesh"] = {} if axis == "one" or (axis == "dp" and size % 2) else {axis: 2}
    if size % (continued["batch"]["micro"] * (2 if continued["mesh"].get("dp") else 1)):
        continued["batch"]["micro"] = 1
    continued["pipeline"] = {}
    continued["cuda_graphs"] = {}
    continued["optimizer"] |= {"zero": 3 - continued["optimizer"]["zero"], "reshard": "auto"}
    continued["optimizer"] |= {"shard_group": None, "bucket_size": None}
    return continued


def merged(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` overwritten by ``base``, key by key in each section."""
    spec = dict(values)
    for name, value in base.items():
        both = isinstance(value, dict) and isinstance(spec.get(name), dict)
        spec[name] = merged(spec[name], value) if both and name != "overrides" else value
    return spec


def split_of(chosen: Choices, facts: Facts) -> Any:
    """Return pipeline.split. uneven: one block on each stage, the rest on the first; ends: embedding and loss count."""
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
