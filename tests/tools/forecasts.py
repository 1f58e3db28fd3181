"""All that plans and searches of small models forecast, as JSON, and two of such files compared field by field.

    python -m tests.tools.forecasts FILE [NAME…]           writes the cases whose names contain one of NAME, or all
    python -m tests.tools.forecasts --compare OLD NEW      prints each field that differs; exit code 1 if any does

A refusal is a forecast too: its words are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from planner import Captured, Plan, plan
from planner.cluster.cluster import read_cluster
from planner.cost.estimate import Estimate
from planner.cost.layout import Layout
from planner.cost.planned import cut_work
from planner.search.search import search
from planner.spec.spec import Spec
from tests.models import deep, hugging_face
from tests.tools.captures import captured_again

CLUSTER = "dgx-a100"
DEPTHS = {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "alone": ({}, {}),
    "tp": ({"tp": 2, "dp": 2}, {}),
    "pipeline": ({"tp": 2, "pp": 2, "dp": 2}, {}),
    "sequence": ({"tp": 2, "pp": 2}, SEQUENCE),
    "full": ({"pp": 2}, {"recompute": "full"}),
    "selective": ({"tp": 2, "pp": 2}, {"recompute": "selective", **SEQUENCE}),
    "context": ({"cp": 2, "pp": 2}, {}),
    "experts": ({"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1}, {"experts": {"imbalance": 1.5}}),
    "a running mean": ({"pp": 2, "dp": 2}, {"optimizer": {"ema": 0.9}}),
}
CASES = [
    *[(family, layout) for family in ("gpt2", "llama") for layout in LAYOUTS if layout != "experts"],
    *[("t5", layout) for layout in ("alone", "tp", "pipeline", "full")],
    *[("mixtral", layout) for layout in ("tp", "pipeline", "selective", "experts")],
]
# of each: further axes of the mesh, and further keys
VARIANTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "none": ({}, {}),
    "selective": ({}, {"recompute": "selective"}),
    "full": ({}, {"recompute": "full"}),
    "compile": ({}, {"compile": True}),
    "zero 3": ({}, {"optimizer": {"zero": 3}}),
    "zero_bubble": ({}, {"pipeline": {"schedule": "zero_bubble"}}),
    "zero_bubble_v": ({"vpp": 2}, {"pipeline": {"schedule": "zero_bubble_v"}}),
    "vpp 2": ({"vpp": 2}, {}),
    "cp 2": ({"cp": 2}, {}),
    "ep 2": ({"ep": 2}, {}),
    "attn graphs": ({}, {"cuda_graphs": {"impl": "emulate", "scope": ["attn"], "warmup_steps": 1}}),
    "full_iteration": ({}, {"cuda_graphs": {"impl": "emulate", "scope": "full_iteration", "warmup_steps": 1}}),
}
_AUTO = {"devices": 8, "recompute": "auto"}
_WAITING = {"pipeline": {"schedule": "auto"}}
_SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": "auto"}}
_OVER_CP = {"mesh": {"pp": "auto", "tp": "auto", "dp": "auto", "cp": 2}}
SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": {"global": 16}, "devices": 16}),
    "gpt2 sequence": ("gpt2", {"devices": 8, **_SEQUENCE}),
    "llama all": ("llama", {**_AUTO, "optimizer": {"zero": "auto"}, **_WAITING}),
    "llama cp": ("llama", _AUTO | _OVER_CP),
    "t5": ("t5", _AUTO | {"devices": 4}),
    "mixtral": ("mixtral", _AUTO | _WAITING),
}
_ROWS = ("memory", "cost", "collectives", "graph_slots", "graph_regions", "recompute", "compiled", "schedule")


def main() -> None:
    if sys.argv[1] == "--compare":
        old, new = (json.loads(Path(name).read_text()) for name in sys.argv[2:])
        found = list(differences(old, new))
        print("\n".join(found) or f"no difference in {len(new)} forecasts")
        raise SystemExit(bool(found))
    file, *only = sys.argv[1:]
    Path(file).write_text(json.dumps(dict(forecasts(only)), indent=0, sort_keys=True))


def forecasts(only: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Name of a case → its fields."""
    seen = set[str]()
    for family, layout in CASES:
        for variant in VARIANTS:
            name, spec = f"{family}, {layout}, {variant}", spec_of(family, layout, variant)
            if (key := family + json.dumps(spec, sort_keys=True)) not in seen and _is_asked(name, only):
                seen.add(key)
                yield name, _refused_or(lambda family=family, spec=spec: _of_plan(family, spec))
    for name in SEARCHES:
        if _is_asked(f"search {name}", only):
            yield f"search {name}", _refused_or(lambda name=name: _of_search(*SEARCHES[name]))


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """``case: field: old → new``, of values that are equal in neither type nor digit."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{at}: {key}" if at else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}[{place}]")
    elif old != new:
        yield f"{at}: {old} → {new}"


def spec_of(family: str, layout: str, variant: str) -> dict[str, Any]:
    (axes, keys), (further, more) = LAYOUTS[layout], VARIANTS[variant]
    mesh = axes | further
    batch = {"global": 8 * mesh.get("dp", 1), "micro": 2}
    plain = {"tensor_parallel": {"vocabulary_multiple": 8}, "cluster": CLUSTER, "inputs": deep.inputs_of(family)}
    found = {**plain, "mesh": mesh, "batch": batch, **keys}
    for key, value in more.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, Mapping) else value
    return found


@cache
def _captured(family: str) -> Captured:
    member = hugging_face.ZOO[family]
    depths = {key: DEPTHS[key] for key in member.sizes if key in DEPTHS}
    model = hugging_face.made(replace(member, sizes=member.sizes | depths))
    return captured_again(model, {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": deep.inputs_of(family)})


def _of_plan(family: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    made = plan(_captured(family), asked)
    values = json.loads(json.dumps(made.to_dict()))
    found = {name: values[name] for name in _ROWS} | {"hash": made.hash(), "diagnostics": values["diagnostics"]}
    found["evaluation"] = [asdict(row) for row in made.evaluation_memory()]
    return found | _estimated(made)


def _estimated(made: Plan) -> dict[str, Any]:
    """By the search's own arithmetic, from the plan's stages."""
    spec, decisions = Spec.load(made.spec), made.to_run()[0]
    recompute = str(spec.recompute)
    layout = Layout(
        made.mesh, 2, made.schedule.num_microbatches, bool(spec.tensor_parallel.sequence_parallel), recompute,
        made.schedule.kind, tuple(map(len, decisions.stages.blocks_of_stage)), int(spec.optimizer.zero),
    )  # fmt: skip
    cluster, work = read_cluster(CLUSTER), cut_work(*made.to_run(), spec, {recompute})
    found = Estimate(work, layout, cluster, spec)
    rows = [asdict(row) for row in found.memory]
    return {
        "estimate": json.loads(json.dumps({"memory": rows, "cost": asdict(found.cost), "at least": found.at_least}))
    }


def _of_search(family: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    result = search(deep.captured(family), deep.spec_of(family, **keys), read_cluster(CLUSTER), top=20)
    best = [
        {"layout": str(c.point), "cost": asdict(c.estimate.cost), "memory": [asdict(row) for row in c.estimate.memory]}
        for c in result.best
    ]
    losers = [[loser.choice, str(loser.candidate.point), loser.fits, loser.why] for loser in result.losers]
    refused = [[str(cut), why] for cut, why in result.refused]
    return json.loads(json.dumps({"best": best, "losers": losers, "refused": refused, "pruned": result.pruned}))


def _refused_or(make: Any) -> dict[str, Any]:
    try:
        return make()
    except PlanError as error:
        return {"refused": [str(error.what), str(error.where), str(error.fix)]}


def _is_asked(name: str, only: Sequence[str]) -> bool:
    return not only or any(word in name for word in only)


if __name__ == "__main__":
    main()
