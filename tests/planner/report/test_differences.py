"""Differences of two plans: nothing of equal ones, of others every field that was changed, in its place."""

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from passes.errors import PlanError
from passes.types.conversions import CollectivePlan
from planner.compiled.pieces import CompiledRow
from planner.cost.layout import CostPlan
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import build_schedule
from planner.recompute.decide import RecomputeRow
from planner.report.differences import KEYS, NOTHING, ROW, differences, differences_text
from planner.tables.tables import ExpertsPlan, LengthPlan, Tables
from tests.tools import paths

GOLDEN = paths.GOLDEN / "differences.txt"
AGAIN = ("h.0", 0, "full", "h.0.attn   (gpt.py:9, `x`)", "linear, add", 512, 4096, 1024)


@pytest.fixture
def whole_plan(small_plan: Plan) -> Plan:
    """The small plan, and a row of each table that it has none of."""
    again = (RecomputeRow(*AGAIN), replace(RecomputeRow(*AGAIN), block="h.1", where="h.1.attn   (gpt.py:9, `x`)"))
    return replace(
        small_plan,
        recompute=again,
        compiled=(CompiledRow("h.0", 0, "h.0.mlp   (gpt.py:5, `x`)", "gelu, mul", 0),),
        experts=(ExpertsPlan("h.0.moe", 8, 2, "slots", 0, ((0,), (1,)), 64),),
        lengths=(
            LengthPlan(256, 16, 4, 1 << 20, 1 << 10, 0.5, "abc"),
            LengthPlan(512, 8, 2, 2 << 20, 2 << 10, None, "d"),
        ),
    )


def told(before: Plan, after: Plan) -> list[tuple[Any, ...]]:
    return [(c.table, c.name, c.count, c.field, c.before, c.after) for c in differences(before, after).changes]


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
    found = differences(whole_plan, Plan.from_dict(json.loads(json.dumps(whole_plan.to_dict()))))
    assert not found.any
    assert found.same_decisions
    assert differences_text(found, "a", "b") == f"{NOTHING}\n"


def test_every_table_of_rows_has_a_key(whole_plan: Plan):
    values = whole_plan.to_dict()
    assert {name for name in values if isinstance(values[name], list)} == KEYS.keys()
    assert KEYS.keys() < {field.name for field in fields(Tables)}


@pytest.mark.thorough
def test_every_value_that_is_changed_appears_in_its_table(whole_plan: Plan):
    tables = set[str]()
    for path, value in places(whole_plan.to_dict()):
        changed = with_value(whole_plan, path, other(value)) if path != ("version",) else None
        if changed is None:
            continue
        tables.add(path[0])
        found = differences(whole_plan, changed)
        assert any(c.table == path[0] for c in found.changes), path
        assert not differences(changed, changed).any
        assert differences_text(found, "a", "b")
        if path[0] not in ("schedule", "spec") or "orders" not in path:
            assert json.dumps(other(value)) in json.dumps(found.to_dict()) or str(other(value)) in str(found), path
    assert tables == whole_plan.to_dict().keys() - {"version"}


def test_every_row_that_is_taken_away_appears(whole_plan: Plan):
    for name, rows in whole_plan.to_dict().items():
        for index in range(len(rows)) if isinstance(rows, list) and name != "stages" else ():
            kept = getattr(whole_plan, name)
            fewer = replace(whole_plan, **{name: kept[:index] + kept[index + 1 :]})
            assert any(c.field == ROW and c.after is None for c in differences(whole_plan, fewer).changes)
            assert any(c.field == ROW and c.before is None for c in differences(fewer, whole_plan).changes)


def test_rows_in_another_order_are_told(small_plan: Plan):
    turned = replace(small_plan, parameters=small_plan.parameters[::-1])
    assert told(small_plan, turned) == [("parameters", "parameters", 11, "order", "as listed", "in another order")]


def test_a_change_of_repeated_blocks_is_one_line(small_plan: Plan):
    rows = [replace(p, reason="asked") if "up" in p.name else p for p in small_plan.parameters]
    assert told(small_plan, replace(small_plan, parameters=tuple(rows))) == [
        ("parameters", "h.{0,1}.mlp.up.weight", 2, "reason", "cheapest typing of its block", "asked"),
    ]


def test_a_collective_of_repeated_blocks_that_is_gone_is_one_line(small_plan: Plan):
    fewer = tuple(c for c in small_plan.collectives if "mlp.down" not in c.where)
    ((*line, _, after),) = told(small_plan, replace(small_plan, collectives=fewer))
    assert line[:1] + line[2:] == ["collectives", 2, ROW]
    assert line[1] == "h.{0,1}.mlp.down all_reduce tp forward microbatch"
    assert after is None


def test_a_plan_without_cost_beside_one_with_it(small_plan: Plan):
    (change,) = differences(replace(small_plan, cost=None), small_plan).changes
    assert (change.table, change.before, change.after["step_seconds"]) == ("cost", None, 0.004)


def test_plans_that_decide_the_same_say_so(small_plan: Plan):
    words = "both plans make the same decisions: only estimates, diagnostics or remarks differ"
    assert words in differences_text(differences(small_plan, replace(small_plan, diagnostics=())), "a", "b")
    assert words not in differences_text(differences(small_plan, replace(small_plan, collectives=())), "a", "b")


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
