"""The page of 405 billion parameters on 16,384 devices: small, few elements, all of it there and to be found."""

from collections import Counter
from pathlib import Path

import pytest

from passes.program.program import BoundaryPlan
from passes.types.conversions import CollectivePlan
from passes.types.types import I, Placement, V
from planner import plan
from planner.cost.layout import CostPlan
from planner.cost.memory import MemoryRow
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import SchedulePlan, build_schedule
from planner.report.page.plan_page import plan_page
from planner.sharding.boxes import Part
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Diagnostic, StagePlan, Summary
from tests.planner.report.page.test_browser import LAYOUT
from tests.planner.report.page.test_plan_page import names_of, tables_of
from tests.test_specs_golden import LARGE
from tests.tools.browser import ask, needs_browser
from tests.tools.html_page import read_page
from tests.tools.paths import ROOT

MIB = 1 << 20
MOST_BYTES, MOST_ELEMENTS = 3 * MIB, 15_000
NUM_BLOCKS, PP, WIDTH = 126, 16, 16384
WEIGHTS: dict[str, tuple[tuple[int, ...], Placement, str]] = {
    "norm1.weight": ((WIDTH,), I, "replicate"),
    "attention.q.weight": ((WIDTH, WIDTH), V(0, WIDTH), "column"),
    "attention.k.weight": ((1024, WIDTH), V(0, 1024), "column"),
    "attention.v.weight": ((1024, WIDTH), V(0, 1024), "column"),
    "attention.out.weight": ((WIDTH, WIDTH), V(1, WIDTH), "row"),
    "norm2.weight": ((WIDTH,), I, "replicate"),
    "mlp.gate.weight": ((53248, WIDTH), V(0, 53248), "column"),
    "mlp.up.weight": ((53248, WIDTH), V(0, 53248), "column"),
    "mlp.down.weight": ((WIDTH, 53248), V(1, 53248), "row"),
}


def stage_of(block: int) -> int:
    return min((block + 1) // 8, PP - 1)


def parameter(name: str, shape: tuple[int, ...], placement: Placement, style: str, stages: tuple[int, ...]):
    where = f"{name.rpartition('.')[0]}   (llama.py:{len(name)}, `return self.down(self.gate(x) * self.up(x))`)"
    return ParameterPlan.of(
        Part(placement, 8), name=name, shape=shape, dtype="bfloat16", style=style, stages=stages, where=where,
        reason="linear: features sharded by heads: each rank runs attention on its own heads",
    )  # fmt: skip


def exchanges(i: int) -> list[CollectivePlan]:
    return [
        CollectivePlan(
            "all_reduce", "tp", phase, f"blocks.{i}.{module}   (llama.py:9, `x`)", 1 << 27, 1, "microbatch",
            stage_of(i), f"blocks.{i}",
        )
        for module, phase in (("attention.q", "backward"), ("attention.out", "forward"), ("mlp.down", "forward"))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def large_plan() -> Plan:
    """By hand, as the planner would say it: to plan it takes half a minute."""
    mesh = Mesh(tp=8, pp=PP, dp=128)
    hidden = (BoundaryPlan("x", (1, 4096, WIDTH), "bfloat16", 1 << 27),)
    of_stage = [tuple(f"blocks.{i}" for i in range(NUM_BLOCKS) if stage_of(i) == s) for s in range(PP)]
    schedule = build_schedule("1f1b", PP, 32)
    return Plan(
        spec={"batch": {"global": 4096, "micro": 1}, "cluster": "dgx-h100"},
        mesh=mesh,
        parameters=(
            parameter("tokens.weight", (128256, WIDTH), V(0, 128256), "vocab", (0,)),
            *(parameter(f"blocks.{i}.{n}", *w, (stage_of(i),)) for i in range(NUM_BLOCKS) for n, w in WEIGHTS.items()),
            parameter("head.weight", (128256, WIDTH), V(0, 128256), "vocab", (PP - 1,)),
        ),
        collectives=(
            *(row for i in range(NUM_BLOCKS) for row in exchanges(i)),
            *(
                CollectivePlan(kind, "dp", "step", f"optimizer.buffers.{s}.buckets.{b}", 1 << 29, 1, "step", s)
                for s in range(PP)
                for b in range(25)
                for kind in ("reduce_scatter", "all_gather")
            ),
        ),
        stages=tuple(
            StagePlan(s, s, 0, of_stage[s], 25_000_000_000, hidden if s else (), hidden if s < PP - 1 else ())
            for s in range(PP)
        ),
        schedule=SchedulePlan("1f1b", 32, schedule.orders, 0.319, (1,) * PP),
        memory=tuple(MemoryRow(s, 6 << 30, 12 << 30, 1 << 30, (16 - s) << 32) for s in range(PP)),
        cost=CostPlan(8.0, 5.0, tp_comm=1.0, pp_bubble=2.0),
        diagnostics=tuple(Diagnostic("info", "the mask is causal", f"blocks.{i}.attention") for i in range(NUM_BLOCKS)),
        summary=Summary(1.0, 1.0, 405_000_000_000),
    )


def test_the_page_is_small_and_has_few_elements(large_plan: Plan):
    for full, most in ((False, MIB // 2), (True, MOST_BYTES)):
        text = plan_page(large_plan, full=full)
        assert len(text.encode()) < most
        assert len(list(read_page(text).all())) < (MOST_ELEMENTS if not full else 4 * MOST_ELEMENTS)


def test_all_parameters_are_told(large_plan: Plan):
    page = read_page(plan_page(large_plan))
    rows = tables_of(page)[f"Parameters ({len(large_plan.parameters)})"]
    names = Counter(name for row in rows for name in names_of(row[0]))
    assert names == Counter(p.name for p in large_plan.parameters)


@needs_browser
def test_it_opens_and_nothing_is_cut_off(large_plan: Plan, tmp_path: Path):
    assert ask(plan_page(large_plan), tmp_path, LAYOUT) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_the_page_of_the_planned_405b_shape_is_below_three_mebibytes():
    name = "llama_405b_tp8_pp16_dp128"
    found = plan(LARGE[name](), ROOT / "specs" / f"{name}.yaml")
    text = plan_page(found)
    assert len(text.encode()) < MIB
    assert len(plan_page(found, full=True).encode()) < MOST_BYTES
    assert len(list(read_page(text).all())) < MOST_ELEMENTS
