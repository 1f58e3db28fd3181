"""plan(): what it cannot do yet is refused, example inputs are one microbatch, settings of parameters by globs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from examples.gpt import build
from passes.errors import PlanError
from planner import plan
from planner.spec.spec import Spec
from planner.updates import Settings, base_of, settings_of

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


# ---- which settings each parameter has, by globs of the spec and by its shape


@dataclass(frozen=True)
class Row:
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()


ROWS = (Row("wte.weight", (9, 4), ("lm_head.weight",)), Row("h.0.norm.weight", (4,)), Row("h.0.mlp.up.bias", (8,)))


def found(**optimizer: Any) -> dict[str, Settings]:
    spec = Spec.load({"mesh": {}, "batch": {"global": 1, "micro": 1}, "optimizer": {"lr": 1e-3, **optimizer}})
    again = Spec.load(spec.to_dict())
    assert settings_of(spec.optimizer, ROWS) == settings_of(again.optimizer, ROWS)
    return settings_of(spec.optimizer, ROWS)


def test_without_groups_all_have_the_section() -> None:
    assert found() == {}


def test_vectors_do_not_decay() -> None:
    made = found(no_decay="vectors", weight_decay=0.1)
    assert {name: s.weight_decay for name, s in made.items()} == {"h.0.norm.weight": 0.0, "h.0.mlp.up.bias": 0.0}


def test_a_group_changes_the_keys_that_it_writes() -> None:
    made = found(groups={"*.bias": {"lr": 1e-4}, "*norm*": {"betas": [0.5, 0.6], "eps": 1e-6}})
    assert made["h.0.mlp.up.bias"] == Settings(1e-4, (0.9, 0.95), 1e-8, 0.01)
    assert made["h.0.norm.weight"] == Settings(1e-3, (0.5, 0.6), 1e-6, 0.01)
    base = Settings(1e-3, (0.9, 0.95), 1e-8, 0.01)
    assert [s.told(base) for s in made.values()] == ["betas 0.5 0.6, eps 1e-06", "lr 0.0001"]
    assert made["h.0.mlp.up.bias"].factor(base) == pytest.approx(0.1)


def test_a_group_goes_before_what_vectors_have() -> None:
    made = found(no_decay="vectors", groups={"*.bias": {"weight_decay": 0.3}})
    assert made["h.0.mlp.up.bias"].weight_decay == 0.3
    assert made["h.0.norm.weight"].weight_decay == 0.0


def test_a_tied_parameter_has_every_name() -> None:
    assert list(found(groups={"lm_head*": {"lr": 3e-5}})) == ["wte.weight"]


def test_two_globs_may_say_the_same() -> None:
    assert len(found(groups={"h.*": {"weight_decay": 0.5}, "*.bias": {"weight_decay": 0.5, "lr": 1e-5}})) == 2


@pytest.mark.parametrize(
    ("groups", "what", "fix"),
    [
        ({"*.biass": {"lr": 1e-5}}, "'*.biass' names no parameter", "such as h.0.mlp.up.bias"),
        ({"h.*": {"lr": 1e-5}, "*.bias": {"lr": 1e-4}}, "give h.0.mlp.up.bias different values of lr", "narrower"),
    ],
)
def test_globs_that_name_nothing_or_contradict_are_refused(groups: Any, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        found(groups=groups)
    assert what in error.value.what
    assert fix in error.value.fix


def test_the_base_is_the_section() -> None:
    spec = Spec.load({"mesh": {}, "batch": {"global": 1, "micro": 1}, "optimizer": {"lr": 0.0}})
    base = base_of(spec.optimizer)
    assert Settings(1e-3, (0.9, 0.95), 1e-8, 0.0).factor(base) == 1.0
