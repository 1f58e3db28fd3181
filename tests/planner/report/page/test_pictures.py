"""Pictures are true: a cut covers its tensor once, a device lies in its node, bars have one scale; colours differ."""

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import planner.report.page
import runtime.report.runs
from planner import Plan
from planner.cost.memory import MemoryRow
from planner.fold import LOOP
from planner.fold import V as TURNED
from planner.mesh import Mesh
from planner.pipeline.schedule import build_schedule
from planner.pipeline.simulate import planned
from planner.report.page import plan_page as charts
from planner.report.page.engine import DARK, FILLS, LIGHT, LINES, ON_FILL, SURFACES, TEXTS, css
from planner.report.page.plan_page import MEMORY_PARTS, link_of, memory_bars, plan_page, timeline, traffic_bars
from planner.report.shapes import LENGTH, bars_of
from planner.tables.tables import StagePlan
from tests.planner.report.test_timeline import contrast

# ---- bars


def test_bars_are_to_one_scale_and_keep_their_order():
    rows = [("a", [("x", 10, "x 10"), ("y", 30, "y 30")], ""), ("bb", [("x", 0, ""), ("y", 20, "y 20")], "")]
    bars = bars_of("t", rows, ["x", "y"], [(80, "limit")])
    first, second = bars.bars
    widths = [s.width for s in first.segments]
    assert widths == [LENGTH / 8, LENGTH * 3 / 8]
    assert second.segments[0].width == LENGTH / 4
    assert second.segments[0].fill == 1
    assert bars.limits[0][0] - first.segments[0].x == pytest.approx(LENGTH)
    assert bars.legend == ((0, "x"), (1, "y"))


@pytest.mark.thorough
def test_memory_has_every_category_of_every_pp_rank_and_the_limit_where_it_matters(moe_plan: Plan, small_plan: Plan):
    from planner.report.page.plan_page import cluster_of

    cluster, _ = cluster_of(moe_plan)
    assert cluster is not None
    bars = memory_bars(moe_plan, cluster)
    assert bars is not None
    assert [bar.name for bar in bars.bars] == ["pp rank 0", "pp rank 1"]
    assert bars.limits == ()
    assert "3.5% of that" in bars.note  # the context of a device and six communicators: a link of each direction
    large = replace(moe_plan.memory[0], activations=90 << 30, total=-1)
    bars = memory_bars(replace(moe_plan, memory=(large,)), cluster)
    assert bars is not None
    (limit,) = bars.limits
    bar = bars.bars[0]
    assert bar.segments[0].x < limit[0] < bar.segments[-1].x + bar.segments[-1].width
    assert len(bar.segments) == sum(getattr(large, part) > 0 for part in MEMORY_PARTS)


@pytest.mark.thorough
def test_bytes_of_an_axis_are_those_of_the_rows_times_the_microbatches(moe_plan: Plan):
    bars = traffic_bars(moe_plan, None)
    assert bars is not None
    words = [s.words for bar in bars.bars for s in bar.segments if bar.name == "tp"]
    times = moe_plan.schedule.num_microbatches
    of_rank = [
        sum(c.bytes * c.count * times for c in moe_plan.collectives if (c.axis, c.phase, c.stage) == ("tp", phase, 1))
        for phase in ("forward", "backward")
    ]
    again = sum(c.bytes * c.count * times for c in moe_plan.collectives if c.axis == "tp" and c.again and c.stage == 1)
    assert words[0] == f"tp, forward: {of_rank[0]:,} bytes"
    assert words[1] == f"tp, backward: {of_rank[1] - again:,} bytes"


def test_an_axis_uses_the_link_that_joins_its_ranks(moe_plan: Plan):
    from planner.cluster.cluster import read_cluster

    cluster = read_cluster("dgx-h100")
    plan = replace(moe_plan, mesh=replace(Mesh(tp=8, pp=2, dp=4), vpp=1))
    links = [link_of(axis, plan, cluster) for axis in ("tp", "dp", "pp", "world", "embedding", "unknown")]
    inner, outer = cluster.links[0].name, cluster.links[-1].name
    assert links == [inner, outer, outer, outer, outer, ""]
    assert link_of("tp", plan, None) == ""


# ---- the schedule


def test_styles_of_the_chart_reach_nothing_else_on_the_page(moe_plan: Plan):
    chart = timeline(moe_plan)
    assert chart is not None
    style = chart.svg.partition("<style>")[2].partition("</style>")[0]
    selectors = re.findall(r"(?:^|[{}])\s*([^{}@]+)\{", re.sub(r"@media[^{]+\{", "", style))
    assert len(selectors) > 10
    assert all(part.strip().startswith(".schedule ") for s in selectors for part in s.split(","))
    assert style.count("{") == style.count("}")
    assert "@media (prefers-color-scheme: dark)" in style


def test_of_a_long_schedule_the_head_is_drawn_and_that_is_told(moe_plan: Plan, monkeypatch: pytest.MonkeyPatch):
    orders = build_schedule("1f1b", 2, 64).orders
    long = replace(moe_plan, schedule=replace(moe_plan.schedule, num_microbatches=64, orders=orders))
    whole = timeline(long)
    assert whole is not None
    assert whole.note == ""
    assert whole.svg.count('class="action') >= 256
    monkeypatch.setattr(charts, "MOST_DRAWN", 100)
    cut = timeline(long)
    assert cut is not None
    assert re.search(r"the first (9\d|10\d) of 256 actions", cut.note)
    assert cut.svg.count('class="action') < 120


def test_categories_of_memory_are_all_that_a_row_sums(moe_plan: Plan):
    for row in moe_plan.memory:
        assert sum(getattr(row, part) for part in MEMORY_PARTS) == row.total
    assert {f.name for f in fields(MemoryRow)} == {*MEMORY_PARTS, "pp_rank", "total", "peak", "of_microbatch"}


@pytest.mark.parametrize(("kind", "vpp", "fold"), [("zero_bubble", 1, LOOP), ("zero_bubble_v", 2, TURNED)])
def test_gradients_of_weights_are_drawn_as_actions_of_their_own(moe_plan: Plan, kind: str, vpp: int, fold):
    row = planned(build_schedule(kind, 2, 4, vpp=vpp))
    mesh = Mesh(pp=2, vpp=vpp, fold=fold)
    stages = tuple(StagePlan(i, mesh.pp_rank_of(i), mesh.chunk_of(i), (), 0) for i in range(2 * vpp))
    whole = replace(moe_plan, mesh=mesh, schedule=row, stages=stages, parameters=(), memory=())
    chart = timeline(whole)
    assert chart is not None
    assert chart.svg.count('class="action W"') >= 8 * vpp
    assert 'id="schedule"' in plan_page(whole)


# ---- colours stand out (WCAG 2.2: 4.5 for text, 3 for shapes), and the style sheets have no others


TEMPLATES = [Path(package.__path__[0]) / "templates" for package in (planner.report.page, runtime.report.runs)]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_stands_out_from_every_surface(theme: dict[str, str]):
    for text, surface in itertools.product(TEXTS, SURFACES):
        assert contrast(theme[text], theme[surface]) >= 4.5, (text, surface)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_shapes_have_an_edge_that_stands_out_and_so_does_each_line_of_a_chart(theme: dict[str, str]):
    for shape, surface in itertools.product(("edge", *LINES), SURFACES):
        assert contrast(theme[shape], theme[surface]) >= 3, (shape, surface)


def test_what_is_written_on_a_fill_can_be_read_and_fills_differ():
    assert all(contrast(ON_FILL, fill) >= 4.5 for fill in FILLS)
    assert len(set(FILLS)) == len(FILLS)


def test_both_themes_have_the_same_names():
    assert LIGHT.keys() == DARK.keys()
    assert css().count("--ink:") == 2


@pytest.mark.parametrize("file", sorted(f for d in TEMPLATES for f in d.iterdir()), ids=lambda path: path.name)
def test_templates_name_no_colour_of_their_own(file: Path):
    text = file.read_text()
    assert not re.search(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b(?![\w-])|rgba?\(|hsl\(", text)
    known = {*LIGHT, "on-fill", *(f"f{i}" for i in range(len(FILLS)))}
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= known
