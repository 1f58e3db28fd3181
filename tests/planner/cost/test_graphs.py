"""CUDA graphs in a forecast: the host launches one graph in place of the kernels inside of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import Plan
from planner.cost.cut.units import CutWork, Phase
from planner.cost.planned import cut_work
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.tools.captures import plan_again
from tests.tools.specs import inputs_of

HOST = 1e-3  # so slow that every kernel waits for it
DEVICE = {"name": "fast", "flops": {"float32": 1e15}, "memory": 10**10, "bandwidth": 1e15, "launch": 1e-9}
SCOPES: dict[str, Any] = {
    "none": {},
    "attention": {"cuda_graphs": {"impl": "local", "scope": ["attn"]}},
    "layers": {"cuda_graphs": {"impl": "local"}},
    "step": {"cuda_graphs": {"impl": "local", "scope": ["full_iteration"]}},
}


def planned(scope: str, at: Path, host: float | None = HOST) -> Plan:
    at.write_text(yaml.safe_dump({
        "name": "x", "device": {**DEVICE, "processors": 4} | ({"host": host} if host else {}),
        "links": [{"name": "in", "devices": 4, "bandwidth": 1e12, "latency": 1e-9}],
    }))  # fmt: skip
    batch = hugging_face.batch("llama")
    inputs = inputs_of(batch)
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, "cluster": str(at), **SCOPES[scope]}
    spec["compile"] = False
    return plan_again(hugging_face.build("llama"), spec)


def work_of(made: Plan) -> CutWork:
    return cut_work(*made.to_run(), Spec.load(made.spec), {"none"})


def phases(work: CutWork) -> list[Phase]:
    """Of one microbatch."""
    return [phase for part in (*work.units, *work.shared) for phase in (part.work.forward, part.work.backward)]


def kernels(work: CutWork) -> int:
    return sum(count for phase in phases(work) for _, count in phase.ops)


def compute(made: Plan) -> float:
    assert made.cost is not None
    return made.cost.compute


def test_the_host_launches_each_graph_and_each_kernel_outside(tmp_path: Path) -> None:
    found = {scope: planned(scope, tmp_path / "x.yaml") for scope in SCOPES}
    work = {scope: work_of(made) for scope, made in found.items()}
    assert {kernels(w) for w in work.values()} == {kernels(work["none"])}
    for scope, made in found.items():
        launched = sum(sum(count for _, count in phase.ops) - phase.saved for phase in phases(work[scope]))
        assert compute(made) == pytest.approx(2 * HOST * launched, rel=1e-3, abs=1e-4), scope
    assert compute(found["none"]) > compute(found["attention"]) > compute(found["layers"]) > compute(found["step"])


def test_whole_layers_are_a_graph_forward_and_one_backward(tmp_path: Path) -> None:
    made = planned("layers", tmp_path / "x.yaml")
    captured = [region for region in made.regions if not region.refused]
    assert captured
    eager, graphed = work_of(planned("none", tmp_path / "x.yaml")), work_of(made)
    inside = sum(phase.saved + (phase.saved > 0) for phase in phases(graphed))
    assert sum(phase.saved for phase in phases(eager)) == 0
    assert sum(phase.saved > 0 for phase in phases(graphed)) == 2 * len(captured)
    assert 0.5 * kernels(eager) < inside < kernels(eager)


def test_a_device_that_never_waits_for_its_host_saves_nothing(tmp_path: Path) -> None:
    at = tmp_path / "x.yaml"
    eager, graphed, step = (compute(planned(scope, at, None)) for scope in ("none", "layers", "step"))
    assert eager == pytest.approx(graphed) == pytest.approx(step)
