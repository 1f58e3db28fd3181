"""plan(): what it cannot do yet is refused, and example inputs are one microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.gpt import build
from planner import PlanError, plan

INPUTS = {"input_ids": {"shape": [16], "dtype": "int64", "high": 50}, "targets": {"like": "input_ids"}}
SPEC: dict[str, Any] = {"mesh": {"tp": 2}, "batch": {"global": 4, "micro": 2}}


def test_a_mesh_that_is_auto_needs_a_cluster() -> None:
    with pytest.raises(PlanError, match="names no cluster") as error:
        plan(build(), {**SPEC, "inputs": INPUTS, "mesh": "auto"})
    assert "add `cluster: NAME`" in error.value.fix


@pytest.mark.thorough
def test_a_mesh_that_is_auto_is_planned_as_the_search_found_it() -> None:
    spec = {"mesh": "auto", "batch": {"global": 8}, "inputs": INPUTS, "cluster": "dgx-a100", "devices": 4}
    found = plan(build(), spec)
    assert found.mesh.world_size == 4
    (told,) = [row.what for row in found.diagnostics if row.what.startswith("chosen of")]
    assert "second: " in told
    written = {key: found.spec[key] for key in ("mesh", "batch", "recompute", "tensor_parallel", "pipeline")}
    again = plan(build(), {**spec, **written})
    assert again.hash() == found.hash()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("impl", ["local", "transformer_engine", "emulate"])
def test_graphs_are_planned_for_any_backend_on_any_machine(impl: str) -> None:
    found = plan(build(), {**SPEC, "inputs": INPUTS, "cuda_graphs": {"impl": impl}})
    assert all(row.captured for row in found.graph_regions)
    assert [row.num_graphs for row in found.graph_slots] == [2 * len(found.graph_regions)]


@pytest.mark.parametrize("rows", [1, 3])
def test_example_inputs_that_are_no_microbatch_are_refused(rows: int) -> None:
    ids = torch.zeros(rows, 16, dtype=torch.int64)
    with pytest.raises(PlanError, match=r"a microbatch 2 rows"):
        plan(build(), SPEC, {"input_ids": ids, "targets": ids})


def test_one_example_tensor_may_stand_for_two_inputs_and_the_model_is_not_changed() -> None:
    model = build()
    before = {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()}
    ids = torch.zeros(2, 16, dtype=torch.int64)
    found = plan(model, SPEC, {"input_ids": ids, "targets": ids})
    assert found.summary.flops_sharded_fraction == 1.0
    assert {name: (p.data_ptr(), p.device) for name, p in model.named_parameters()} == before


def test_planning_inside_a_meta_context_gives_the_same_plan() -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    outside = plan(build(), SPEC, {"input_ids": ids, "targets": ids})
    with torch.device("meta"):
        inside = plan(build(), SPEC, {"input_ids": ids, "targets": ids})
    assert inside.to_dict() == outside.to_dict()
