"""The Plan: rows that check themselves, one JSON that reads back to an equal plan, a hash of the decisions alone."""

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import meshwright
from passes.errors import PlanError
from passes.types.conversions import CollectivePlan
from passes.types.types import I, Placement, Segment
from planner.cost.memory import MemoryRow
from planner.frozen_plan import Plan
from planner.pipeline.actions import Action
from planner.pipeline.schedule import SchedulePlan
from planner.sharding.boxes import Part
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Diagnostic, Summary

# The keys of "Plan as JSON" in the public contract; a row may have more.
CONTRACT = {
    "mesh": "tp pp vpp dp cp ep etp edp world_size order",
    "parameters": "name shape dtype style dim segments local_shape stages reason",
    "collectives": "kind axis phase where bytes count per",
    "stages": "index pp_rank chunk blocks num_parameters receives sends",
    "schedule": "kind num_microbatches orders",
    "graph_regions": "block scope captured reason inputs outputs",
    "graph_slots": "pp_rank chunk num_regions num_slots num_graphs num_replays input_bytes output_bytes gradient_bytes",
    "optimizer": "buffers",
    "memory": "pp_rank parameters gradients optimizer activations graph_buffers total",
    "cost": "step_seconds compute tp_comm pp_bubble dp_comm",
    "diagnostics": "level what where fix",
    "summary": "flops_sharded_fraction parameters_sharded_fraction num_parameters",
}


def test_json_has_the_keys_of_the_contract(small_plan: Plan):
    values = small_plan.to_dict()
    for name, keys in CONTRACT.items():
        rows = values[name] if isinstance(values[name], list) else [values[name]]
        assert rows
        for row in rows:
            assert set(keys.split()) <= row.keys()
    assert values["schedule"]["orders"][1][:2] == [["F", 0, 0], ["B", 0, 0]]
    assert not {"decisions", "shards"} & values.keys()


def test_save_and_load_give_an_equal_plan_without_its_source(small_plan: Plan, tmp_path: Path):
    path = tmp_path / "plan.json"
    replace(small_plan, decisions=object()).save(path)
    loaded = Plan.load(path)
    assert loaded == small_plan
    assert loaded.decisions is None
    assert loaded.shards is None
    assert loaded.hash() == small_plan.hash()
    assert loaded.describe() == small_plan.describe()
    assert Plan.from_dict(json.loads(json.dumps(small_plan.to_dict(), indent=2))) == small_plan
    assert json.loads(path.read_text())["meshwright"] == meshwright.__version__


def test_repr_is_one_line(small_plan: Plan):
    assert repr(small_plan) == f"Plan(tp 2 · pp 2; 1f1b, {len(small_plan.parameters)} parameters)"


def test_a_plan_without_cost_round_trips(small_plan: Plan):
    plan = replace(small_plan, cost=None)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_saved_plan_has_one_line_for_each_row(small_plan: Plan, tmp_path: Path):
    small_plan.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert sum('"local_shape"' in line for line in lines) == len(small_plan.parameters)


def test_a_plan_is_frozen_and_pickles(small_plan: Plan):
    with pytest.raises(FrozenInstanceError):
        small_plan.summary = Summary()  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(small_plan)) == small_plan


def test_saving_replaces_the_old_file_whole_and_leaves_nothing_else(small_plan: Plan, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    small_plan.save(path)
    assert Plan.load(path) == small_plan
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_is_a_plan_error_and_keeps_the_old_file(small_plan: Plan, tmp_path: Path):
    with pytest.raises(PlanError, match="cannot write the plan: No such file or directory"):
        small_plan.save(tmp_path / "none" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot write the plan"):
        small_plan.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def damaged(plan: Plan, **changes) -> str:
    return json.dumps(plan.to_dict() | changes)


def test_files_that_are_no_plan_are_refused_with_the_reason(small_plan: Plan, tmp_path: Path):
    path = tmp_path / "plan.json"
    small_plan.save(path)
    whole = path.read_text()
    rows = small_plan.to_dict()["memory"]
    cases = [
        (whole[: len(whole) // 2], "damaged or truncated"),
        ("", "damaged or truncated"),
        ("[1, 2]", "this is not a saved plan"),
        ("{}", "this is not a saved plan"),
        (damaged(small_plan, version=99), "the plan has version 99, this program reads version 1"),
        (damaged(small_plan, memory=[{**rows[0], "total": 1}]), "1 is not the sum 18432"),
        (
            damaged(small_plan, memory=[{**rows[0], "total": "1"}]),
            r"plan.memory\[0\].total must be of type int, not str",
        ),
        (damaged(small_plan, memory=[{"pp_rank": 0}]), r"plan.memory\[0\].activations is missing"),
        (damaged(small_plan, extra=1), "plan.extra is unknown"),
        (damaged(small_plan, stages=[]), "0 stages for pp·vpp = 2"),
        (damaged(small_plan, schedule=5), "plan.schedule must be of type dict, not int"),
    ]
    for text, what in cases:
        path.write_text(text)
        with pytest.raises(PlanError, match=what) as caught:
            Plan.load(path)
        assert str(caught.value.where) == str(path)
        assert caught.value.fix


def test_a_missing_file_is_one_plan_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        Plan.load("plan.json")
    assert_expected_inline(
        str(caught.value),
        """\
there is no plan file plan.json
  at:  plan.json
  fix: save one: meshwright plan MODEL SPEC --format json -o FILE""",
    )


def test_the_hash_is_of_the_decisions_not_of_remarks_or_estimates(small_plan: Plan):
    remark = replace(small_plan.parameters[1], where="elsewhere.py:1", origin="other.yaml:2", reason="other words")
    same = replace(
        small_plan,
        parameters=(small_plan.parameters[0], remark, *small_plan.parameters[2:]),
        spec=small_plan.spec | {"cluster": "my/cluster.yaml"},
        cost=None,
        memory=(),
        diagnostics=(),
        decisions=object(),
    )
    assert same.hash() == small_plan.hash()
    assert len(small_plan.hash()) == 64


@pytest.mark.parametrize("name", ["parameters", "collectives"])
def test_the_hash_changes_with_any_decision(small_plan: Plan, name: str):
    fewer = replace(small_plan, **{name: getattr(small_plan, name)[:-1]})
    assert fewer.hash() != small_plan.hash()
    assert replace(small_plan, spec=small_plan.spec | {"seed": 1}).hash() != small_plan.hash()


def test_a_parameter_row_follows_its_placement():
    fused = Placement("V", 0, (Segment(8), Segment(2, False)), padding=0)
    row = ParameterPlan.of(
        Part(fused, 2), name="qkv", shape=(10, 4), dtype="float32", style="column", stages=(0,), reason="by heads"
    )
    assert (row.dim, row.segments, row.whole_segments, row.local_shape) == (0, (8, 2), (1,), (6, 4))
    assert row.num_elements == 40
    whole = ParameterPlan.of(
        Part(I, 2), name="ln", shape=(4,), dtype="float32", style="replicate", stages=(0,), reason=""
    )
    assert (whole.dim, whole.segments, whole.local_shape) == (None, (), (4,))


def test_rows_that_contradict_themselves_are_refused(small_plan: Plan):
    embedding = small_plan.parameters[0]
    with pytest.raises(PlanError, match=r"segments .* miss its dim"):
        replace(embedding, segments=(49,))
    with pytest.raises(PlanError, match="whole and yet cut"):
        replace(embedding, dim=None)
    with pytest.raises(PlanError, match="unknown style diagonal"):
        replace(embedding, style="diagonal")
    with pytest.raises(PlanError, match="tp·cp·dp·pp = 4, world_size = 8"):
        replace(small_plan.mesh, world_size=8)
    with pytest.raises(PlanError, match="unknown phase sideways"):
        CollectivePlan("all_reduce", "tp", "sideways", "x", 1, 1, "step")
    with pytest.raises(PlanError, match="counted per year"):
        CollectivePlan("all_reduce", "tp", "forward", "x", 1, 1, "year")
    with pytest.raises(PlanError, match="unknown level fatal"):
        Diagnostic("fatal", "x")
    with pytest.raises(PlanError, match="does not run each forward and its backward once"):
        SchedulePlan("1f1b", 1, ((Action("F", 0, 0),),))


def test_tables_that_contradict_each_other_are_refused(small_plan: Plan):
    with pytest.raises(PlanError, match="a parameter is listed twice"):
        replace(small_plan, parameters=small_plan.parameters * 2)
    with pytest.raises(PlanError, match=r"wte.weight is on stages \(2,\)"):
        replace(small_plan, parameters=(replace(small_plan.parameters[0], stages=(2,)),))
    with pytest.raises(PlanError, match="out of order"):
        replace(small_plan, stages=small_plan.stages[::-1])
    with pytest.raises(PlanError, match="1 orders for pp = 2"):
        replace(small_plan, schedule=replace(small_plan.schedule, orders=small_plan.schedule.orders[:1]))


def test_the_total_of_a_memory_row_is_its_sum():
    assert MemoryRow(0, 1, 2, 4, 8, 16).total == 31
