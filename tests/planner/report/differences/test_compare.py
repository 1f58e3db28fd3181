"""What two plans say otherwise: nothing of equal ones, of others every field that was changed, in its place."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from passes.errors import PlanError
from passes.types.collectives import CollectivePlan
from planner.compiled.rows import CompiledRow
from planner.cost.step_time import CostPlan
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import build_schedule
from planner.recompute.rows import RecomputeRow
from planner.report.differences.change import ROW, Change
from planner.report.differences.compare import covered, differences
from planner.report.differences.show import NOTHING, differences_text
from planner.tables.experts import ExpertsPlan
from planner.tables.rows import LengthPlan
from planner.tables.tables import Tables
from tests.tools import paths

GOLDEN = paths.GOLDEN / "differences.txt"
AGAIN = ("h.0", 0, "full", "h.0.attn   (gpt.py:9, `x`)", "linear, add", 512, 4096, 1024)


@pytest.fixture
def whole_plan(small_plan: Plan) -> Plan:
    """The small plan, and a row of each table that it has none of."""
    again = (RecomputeRow(*AGAIN), replace(RecomputeRow(*AGAIN), block="h.1", where="h.1.attn   (gpt.py:9, `x`)"))
    pieces = (CompiledRow("h.0", 0, "h.0.mlp   (gpt.py:5, `x`)", "gelu, mul", 0),)
    return replace(
        small_plan,
        recompute=again,
        compiled=pieces,
        experts=(ExpertsPlan("h.0.moe", 8, 2, "slots", 0, ((0,), (1,)), 64),),
        lengths=(
            LengthPlan(256, 16, 4, 1 << 20, 1 << 10, 0.5, "abc"),
            LengthPlan(512, 8, 2, 2 << 20, 2 << 10, None, "d"),
        ),
    )


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    return differences(before, after).changes


def told(before: Plan, after: Plan) -> list[tuple[Any, ...]]:
    return [(c.table, c.name, c.count, c.field, *c.shown, c.difference) for c in changes(before, after)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every plain value of nested lists and mappings, by its path."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))
    else:
        yield path, value


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return 7 if value is None else f"{value}x"


def with_value(plan: Plan, path: tuple[Any, ...], new: Any) -> Plan | None:
    """``plan`` with another value at ``path``; None where such a plan contradicts itself."""
    values = copy.deepcopy(plan.to_dict())
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    try:
        return Plan.from_dict(values)
    except PlanError:
        return None


def test_equal_plans_have_no_difference(whole_plan: Plan):
    same = Plan.from_dict(json.loads(json.dumps(whole_plan.to_dict())))
    found = differences(whole_plan, same)
    assert not found.any
    assert found.same_decisions
    assert differences_text(found, "a", "b") == f"{NOTHING}\n"


def test_every_table_of_a_plan_is_compared():
    assert covered() == {field.name for field in fields(Tables)}


@pytest.mark.thorough
def test_every_value_that_is_changed_appears_in_its_table(whole_plan: Plan):
    tables = set[str]()
    for path, value in places(whole_plan.to_dict()):
        changed = with_value(whole_plan, path, other(value)) if path != ("version",) else None
        if changed is None:
            continue
        tables.add(path[0])
        found = changes(whole_plan, changed)
        assert found, path
        assert not changes(changed, changed)
        text = json.dumps([item.to_dict() for item in found]) + str([item.shown for item in found])
        if path[0] not in ("schedule", "spec") or "orders" not in path:
            assert str(other(value)) in text or json.dumps(other(value)) in text, path
        assert [c.difference for c in changes(changed, whole_plan)] or not found
    assert tables == whole_plan.to_dict().keys() - {"version"}


@pytest.mark.parametrize(
    "mesh", [{"tp": 4}, {"pp": 1}, {"dp": 3}, {"cp": 2}, {"order": "tp-cp-dp-ep-pp"}, {"etp": 1, "ep": 2}]
)
def test_every_axis_of_the_mesh_appears(small_plan: Plan, mesh: dict[str, Any]):
    sizes = {"tp": 2, "pp": 2} | mesh
    other_mesh = Mesh(**sizes)
    stages = small_plan.stages[: other_mesh.pp]
    orders = {1: build_schedule("gpipe", 1, 4).orders}.get(other_mesh.pp, small_plan.schedule.orders)
    schedule = replace(
        small_plan.schedule, orders=orders, peak_in_flight=small_plan.schedule.peak_in_flight[: len(orders)]
    )
    rows = (
        tuple(replace(p, stages=(0,)) for p in small_plan.parameters) if other_mesh.pp == 1 else small_plan.parameters
    )
    found = changes(small_plan, replace(small_plan, mesh=other_mesh, stages=stages, schedule=schedule, parameters=rows))
    expected = [(axis, size) for axis, size in mesh.items() if size != getattr(small_plan.mesh, axis)]
    assert [(c.field, c.after) for c in found if c.table == "Mesh" and c.field in mesh] == expected != []


def test_every_row_that_is_taken_away_appears(whole_plan: Plan):
    taken = 0
    for name, rows in whole_plan.to_dict().items():
        for index in range(len(rows)) if isinstance(rows, list) and name != "stages" else ():
            fewer = replace(
                whole_plan, **{name: getattr(whole_plan, name)[:index] + getattr(whole_plan, name)[index + 1 :]}
            )
            taken += 1
            assert any(c.field == ROW and c.difference == "went" for c in changes(whole_plan, fewer)), (name, index)
            assert any(c.field == ROW and c.difference == "came" for c in changes(fewer, whole_plan)), (name, index)
    assert taken > 30


def test_rows_in_another_order_are_told(small_plan: Plan):
    turned = replace(small_plan, parameters=small_plan.parameters[::-1])
    assert told(small_plan, turned) == [("Parameters", "rows", 11, "order", "as listed", "in a different order", "")]


def test_a_cut_of_repeated_blocks_is_one_line(small_plan: Plan):
    rows = [
        replace(p, style="replicate", dim=None, segments=(), local_shape=p.shape, reason="asked")
        if "up" in p.name
        else p
        for p in small_plan.parameters
    ]
    assert told(small_plan, replace(small_plan, parameters=tuple(rows))) == [
        ("Parameters", "h.{0,1}.mlp.up.weight", 2, "cut", "column, dim 0", "replicate", ""),
        ("Parameters", "h.{0,1}.mlp.up.weight", 2, "local shape", "[16, 8]", "[32, 8]", ""),
        ("Parameters", "h.{0,1}.mlp.up.weight", 2, "reason", "cheapest typing of its block", "asked", ""),
    ]


def test_a_block_that_moves_is_one_line(small_plan: Plan):
    rows = tuple(replace(p, stages=(1,)) if p.name.startswith("h.0.") else p for p in small_plan.parameters)
    moved = [c for c in told(small_plan, replace(small_plan, parameters=rows)) if c[0] == "Parameters"]
    assert moved == [("Parameters", "h.0 all 5 of a block", 5, "stages", "0", "1", "")]
    alone = tuple(replace(p, stages=(1,)) if p.name == "h.0.ln.weight" else p for p in small_plan.parameters)
    assert [c[1] for c in told(small_plan, replace(small_plan, parameters=alone))] == ["h.0.ln.weight"]


def test_collectives_are_summed_by_axis_phase_and_kind_before_their_places(small_plan: Plan):
    gone = tuple(c for c in small_plan.collectives if not c.where.startswith("h.1.mlp.down"))
    total, place = "tp forward all_reduce, per microbatch", "h.1.mlp.down all_reduce over tp, forward"
    assert told(small_plan, replace(small_plan, collectives=gone)) == [
        ("Collectives", total, 1, "messages", "7", "6", "1 less (-14.3%)"),
        ("Collectives", total, 1, "bytes", "4.38 KiB", "3.38 KiB", "1.00 KiB less (-22.9%)"),
        ("Places of collectives", place, 1, "row", "1 of 1.00 KiB per microbatch", "-", "went"),
    ]


def test_sizes_that_read_alike_are_told_by_all_digits(small_plan: Plan):
    rows = (replace(small_plan.memory[0], parameters=1 << 30, total=-1), small_plan.memory[1])
    more = (replace(small_plan.memory[0], parameters=(1 << 30) + 1, total=-1), small_plan.memory[1])
    found = told(replace(small_plan, memory=rows), replace(small_plan, memory=more))
    assert (
        "Memory of one rank",
        "pp rank 0",
        1,
        "parameters",
        "1,073,741,824",
        "1,073,741,825",
        "1 B more (+0.0%)",
    ) in found


def test_a_plan_without_cost_beside_one_with_it(small_plan: Plan):
    found = changes(replace(small_plan, cost=None), small_plan)
    assert {c.table for c in found} == {"Estimated time of one step"}
    assert found[0].shown == ("-", "4.000 ms")
    assert next(
        c
        for c in changes(small_plan, replace(small_plan, cost=CostPlan(0.004, 0.002, flops=3e12)))
        if c.field == "flops"
    ).shown == ("0.000 TFLOP", "3.000 TFLOP")
    slower = replace(small_plan, cost=CostPlan(0.008, 0.003, tp_comm=0.001, pp_bubble=0.001))
    assert [(c.field, c.difference) for c in changes(small_plan, slower)] == [
        ("step seconds", "4.000 ms more (×2.00)"),
        ("compute", "1.000 ms more (+50.0%)"),
    ]


def test_plans_that_decide_the_same_say_so(small_plan: Plan):
    text = differences_text(differences(small_plan, replace(small_plan, diagnostics=())), "a.json", "b.json")
    assert "both plans make the same decisions: only estimates, diagnostics or remarks differ" in text
    assert "both plans make the same decisions" not in differences_text(
        differences(small_plan, replace(small_plan, collectives=())), "a.json", "b.json"
    )


def test_another_model_is_said_first(small_plan: Plan):
    rows = tuple(replace(p, name=p.name.replace("h.", "layers.")) for p in small_plan.parameters)
    found = differences(small_plan, replace(small_plan, parameters=rows))
    assert found.models.startswith("different models: 10 parameters only in the first (h.{0,1}.ln.weight, h.{0,1}.attn")
    assert "10 parameters only in the second (layers.{0,1}.ln.weight, " in found.models
    assert differences_text(found, "a", "b").splitlines()[1].startswith("different models: ")


def wider(plan: Plan) -> Plan:
    """The small plan as if on tp 1 · pp 2 · dp 2, under gpipe, with other messages, memory and remarks."""
    whole = {"style": "replicate", "dim": None, "segments": (), "whole_segments": (), "padding": 0, "reason": "tp = 1"}
    sums = CollectivePlan("reduce_scatter", "dp", "step", "optimizer.buffers.0.buckets.0", 2304, 1, "step")
    orders = build_schedule("gpipe", 2, 4).orders
    return replace(
        plan,
        spec=plan.spec | {"mesh": {"tp": 1, "pp": 2}, "batch": {"global": 8, "micro": 1}},
        mesh=Mesh(tp=1, pp=2, dp=2),
        parameters=tuple(replace(p, **whole, local_shape=p.shape, origin="default") for p in plan.parameters),
        collectives=(*(c for c in plan.collectives if c.axis != "tp"), sums),
        schedule=replace(plan.schedule, kind="gpipe", orders=orders, peak_in_flight=(4, 4)),
        graph_regions=tuple(replace(r, captured=True, reason="", bytes=2048) for r in plan.graph_regions),
        memory=tuple(replace(m, activations=m.activations * 5, optimizer=4096, total=-1) for m in plan.memory),
        cost=CostPlan(0.005, 0.004, pp_bubble=0.001),
        diagnostics=plan.diagnostics[2:],
    )


def test_the_text_is_the_golden_one(small_plan: Plan):
    text = differences_text(differences(small_plan, wider(small_plan)), "before.json", "after.json")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 160
