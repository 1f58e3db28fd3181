"""Pipeline schedules: the oracle's orders, refused sizes, simulation, and the text, JSON and SVG forms."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.fold import stage_of
from planner.pipeline.actions import format_order
from planner.pipeline.kinds import KINDS, Sizes
from planner.pipeline.schedule import Action, Schedule, build_schedule, num_warmup, rank_order, schedule_table
from planner.pipeline.simulate import format_schedule, parse_order, parse_schedule, simulate
from planner.pipeline.zero_bubble import StageCosts
from planner.report.schedule import schedule_svg, schedule_to_dict
from tests.tools.examples import examples
from tests.tools.paths import ORACLES
from tests.tools.schedules import forward_only, input_slots

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "schedules.json").read_text())
CASES = ORACLE["cases"]
RUNNABLE = [
    c for c in CASES if not (c["runtime_rejects"] or c["forward_only"] or c["overlap_moe_expert_parallel_comm"])
]


def arguments_of(case: dict) -> dict:
    return {
        "kind": "interleaved_1f1b" if case["vpp"] else "1f1b",
        "pp": case["pp"],
        "num_microbatches": case["num_microbatches"],
        "vpp": case["vpp"] or 1,
        "group_size": case["microbatch_group_size_per_vp_stage"],
    }


def kind_and_sizes(arguments: dict) -> tuple[str, Sizes]:
    return arguments["kind"], Sizes(*(arguments[name] for name in Sizes._fields))


def by_id(case: dict) -> str:
    return str(case["id"])


def by_layout(case: dict) -> str:
    return f"pp{case['pp']}-vpp{case['vpp'] or 1}-rank{case['pp_rank']}"


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_table_warmup_and_order_of_a_rank_equal_the_oracle(case):
    a, extra = arguments_of(case), int(case["overlap_moe_expert_parallel_comm"])
    kind, sizes = kind_and_sizes(a)
    table = schedule_table(sizes)
    assert [list(row) for row in table] == case["schedule_table"]
    if case["forward_only"]:
        schedule = forward_only(build_schedule(**a))
        assert schedule.num_warmup(case["pp_rank"]) == case["num_warmup_microbatches"]
        assert schedule.orders[case["pp_rank"]] == tuple(Action("F", *row) for row in case["schedule_table"])
        return
    assert num_warmup(kind, sizes, case["pp_rank"], extra) == case["num_warmup_microbatches"]
    order = rank_order(kind, sizes, case["pp_rank"], extra)
    assert [list(action) for action in order] == case["steps"]
    assert [a.chunk + 1 if a.kind == "F" else -a.chunk - 1 for a in order] == case["order"]


@pytest.mark.parametrize("case", RUNNABLE, ids=by_id)
def test_json_of_a_schedule_equals_the_oracle(case):
    schedule = build_schedule(**arguments_of(case))
    ours = schedule_to_dict(schedule, simulate(schedule))
    rank = ours["ranks"][case["pp_rank"]]
    assert ours["schedule_table"] == case["schedule_table"]
    assert rank["pp_rank"] == case["pp_rank"]
    assert rank["num_warmup"] == case["num_warmup_microbatches"]
    assert rank["order"] == case["order"]
    assert rank["steps"] == case["steps"]
    assert json.loads(json.dumps(ours)) == ours


@pytest.mark.parametrize("case", [c for c in CASES if c["runtime_rejects"]], ids=by_id)
def test_group_sizes_that_the_oracle_rejects_are_refused(case):
    with pytest.raises(PlanError, match="smaller than pp = 4") as error:
        build_schedule(**arguments_of(case))
    assert error.value.fix


@pytest.mark.parametrize("case", [c for c in CASES if "num_layers_per_chunk" in c], ids=by_id)
def test_static_input_slots_equal_the_oracle(case):
    a, layers = arguments_of(case), case["num_layers_per_chunk"]
    slots = input_slots(rank_order(*kind_and_sizes(a), case["pp_rank"]), layers)
    keys = [(m, c, i) for c in range(a["vpp"]) for m in range(a["num_microbatches"]) for i in range(layers[c])]
    names: dict[int, int] = {}  # the oracle numbers buffers as they first appear by chunk, not as they are made
    assert [names.setdefault(slots[key], len(names)) for key in keys] == case["static_input_buffer_of_slot"]
    assert len(names) == case["num_unique_static_input_buffers"]


@pytest.mark.parametrize("case", ORACLE["unique_buffers_vs_microbatches"], ids=by_layout)
def test_static_input_slots_do_not_grow_with_the_microbatches(case):
    vpp, kind = case["vpp"] or 1, "interleaved_1f1b" if case["vpp"] else "1f1b"
    for num_microbatches, expected in case["unique"].items():
        order = rank_order(kind, Sizes(case["pp"], int(num_microbatches), vpp, case["pp"]), case["pp_rank"])
        assert len(set(input_slots(order, [case["layers_per_chunk"]] * vpp).values())) == expected


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("zigzag", 2, 4), "unknown schedule `zigzag`"),
        (("interleaved_1f1b", 4, 2, 2), "interleaved_1f1b over pp = 4 ranks needs at least 4 microbatches"),
        (("interleaved_1f1b", 4, 6, 2), "6 microbatches in groups of 4 leave a last group of 2, smaller than pp = 4"),
        (("interleaved_1f1b", 4, 8, 1), "needs several chunks on several ranks, but pp = 4 and vpp = 1"),
        (("interleaved_1f1b", 1, 8, 2), "needs several chunks on several ranks, but pp = 1 and vpp = 2"),
        (("1f1b", 2, 4, 2), "1f1b runs one chunk per rank, but vpp = 2"),
        (("gpipe", 2, 0), "microbatches = 0"),
    ],
)
def test_sizes_that_make_no_schedule_are_refused(arguments, what):
    with pytest.raises(PlanError) as error:
        build_schedule(*arguments)
    assert what in error.value.what
    assert error.value.fix


def test_kind_left_out_interleaves_only_with_vpp():
    assert build_schedule(None, 2, 4).kind == "1f1b"
    assert build_schedule(None, 2, 4, 2).kind == "interleaved_1f1b"


@st.composite
def schedules(draw, kinds=tuple(KINDS)) -> Schedule:
    kind = draw(st.sampled_from(kinds))
    if not KINDS[kind].runs_chunks:
        pp = draw(st.integers(2 if KINDS[kind].waits else 1, 6))
        return build_schedule(kind, pp, draw(st.integers(1, pp + 12)))
    if KINDS[kind].orders:
        return build_schedule(kind, draw(st.integers(2, 6)), draw(st.integers(1, 18)), 2)
    pp, vpp = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    group_size = draw(st.integers(pp, 2 * pp + 1))
    rest = draw(st.sampled_from([0, *range(pp, group_size)]))
    num_groups = draw(st.integers(0 if rest else 1, 3))
    return build_schedule(kind, pp, num_groups * group_size + rest, vpp, group_size)


@examples(150)
@given(schedules())
def test_every_valid_schedule_completes_with_each_action_once_and_backward_after_forward(schedule):
    simulation = simulate(schedule)
    ran = [(rank, action) for row in simulation.steps for rank, action in enumerate(row) if action]
    cells = schedule.pp * schedule.num_microbatches * schedule.vpp
    assert len(ran) == len(set(ran)) == (3 if schedule.has_weights else 2) * cells
    at = {key: i for i, key in enumerate(ran)}
    for (rank, action), i in at.items():
        if action.kind == "B":
            assert at[rank, action._replace(kind="F")] < i
        if action.kind == "W":
            assert at[rank, action._replace(kind="B")] < i
    assert 0 <= simulation.bubble_fraction < 1


@examples(60)
@given(schedules())
def test_an_action_starts_after_the_neighbouring_stage_has_ended(schedule):
    simulation = simulate(schedule)
    spans = {
        (action.kind, action.microbatch, stage_of(rank, action.chunk, schedule.pp, schedule.fold)): span
        for rank, order in enumerate(schedule.orders)
        for action, span in zip(order, simulation.spans[rank], strict=True)
    }
    for (kind, microbatch, stage), (start, _) in spans.items():
        before = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and (kind, microbatch, before) in spans:
            assert spans[kind, microbatch, before][1] <= start
        if kind == "B":
            assert spans["F", microbatch, stage][1] <= start
        if kind == "W":
            assert spans["B", microbatch, stage][1] <= start


@examples(60)
@given(schedules())
def test_text_form_parses_back_to_the_same_schedule(schedule):
    assert parse_schedule(format_schedule(schedule)) == schedule
    assert parse_order(format_order(schedule.orders[0])) == schedule.orders[0]
    forward = forward_only(schedule)
    assert parse_schedule(format_schedule(forward)) == forward


@examples(60)
@given(schedules())
def test_one_layer_needs_as_many_static_input_slots_as_its_peak_in_flight(schedule):
    slots = tuple(len(set(input_slots(order).values())) for order in schedule.orders)
    assert slots == simulate(schedule).peak_in_flight


@examples(40)
@given(schedules())
def test_forward_only_runs_every_forward_and_keeps_nothing(schedule):
    simulation = simulate(forward_only(schedule))
    kinds = Counter(action.kind for row in simulation.steps for action in row if action)
    assert kinds == {"F": schedule.pp * schedule.vpp * schedule.num_microbatches}
    assert simulation.peak_in_flight == (1,) * schedule.pp


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 12])
def test_bubble_is_stages_minus_one_over_microbatches_plus_stages_minus_one(kind, num_microbatches):
    """Also where there are fewer microbatches than stages."""
    simulation = simulate(build_schedule(kind, 4, num_microbatches))
    assert simulation.bubble_fraction == pytest.approx(3 / (num_microbatches + 3))
    assert simulation.duration == 3 * (num_microbatches + 3)


def test_interleaving_divides_the_bubble_by_vpp():
    assert simulate(build_schedule("interleaved_1f1b", 4, 12, 2)).bubble_fraction == pytest.approx(3 / (2 * 12 + 3))


def test_1f1b_holds_one_microbatch_more_on_each_earlier_rank_and_gpipe_holds_all():
    assert simulate(build_schedule("1f1b", 4, 12)).peak_in_flight == (4, 3, 2, 1)
    assert simulate(build_schedule("gpipe", 4, 12)).peak_in_flight == (12, 12, 12, 12)


def test_a_slow_stage_sets_the_pace_of_all():
    simulation = simulate(build_schedule("1f1b", 2, 4), StageCosts([1.0, 3.0], [1.0, 3.0], [0.0, 0.0]))
    assert simulation.duration == 1 + 4 * 6 + 1
    assert simulation.bubble_fraction == pytest.approx(1 - (8 + 24) / (2 * 26))


def test_grid_shows_a_row_for_each_step_and_a_column_for_each_rank():
    assert simulate(build_schedule("1f1b", 2, 2)).grid().splitlines() == [
        "step  rank0 rank1",
        "0     F0.0  .",
        "1     F1.0  F0.0",
        "2     .     B0.0",
        "3     B0.0  F1.0",
        "4     .     B1.0",
        "5     B1.0  .",
    ]


def test_a_deadlock_shows_the_grid_and_what_each_rank_waits_for():
    text = "custom pp=2 vpp=1 microbatches=2 group=2\n0: F0.0 B0.0 F1.0 B1.0\n1: F1.0 F0.0 B0.0 B1.0\n"
    with pytest.raises(PlanError) as error:
        simulate(parse_schedule(text))
    assert error.value.what.splitlines() == [
        "schedule custom (pp = 2, vpp = 1, 2 microbatches) deadlocks at step 1",
        "  step  rank0 rank1",
        "  0     F0.0  .",
        "  rank 0: B0.0 waits for B0.0 of rank 1",
        "  rank 1: F1.0 waits for F1.0 of rank 0",
    ]
    assert error.value.fix


def test_a_backward_listed_before_its_forward_is_a_deadlock():
    text = "custom pp=1 vpp=1 microbatches=1 group=1\n0: B0.0 F0.0\n"
    with pytest.raises(PlanError, match=r"B0\.0 waits for F0\.0 of rank 0"):
        simulate(parse_schedule(text))


def test_text_with_other_lists_than_its_kind_is_a_custom_schedule():
    text = "1f1b pp=1 vpp=1 microbatches=2 group=1\n0: F0.0 F1.0 B1.0 B0.0\n"
    schedule = parse_schedule(text)
    assert schedule.kind == "custom"
    assert schedule.num_warmup(0) == 1
    assert format_schedule(schedule) == text.replace("1f1b", "custom")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "schedule text begins with ``"),
        ("1f1b pp=2\n", "schedule text begins with `1f1b pp=2`"),
        ("1f1b pp=1 vpp=1 microbatches=1 group=1\n0: F0.0 X0.0", "`X0.0` is not an action"),
        ("1f1b pp=1 vpp=1 microbatches=1 group=1\n1: F0.0 B0.0", "the line of pp rank 0 begins with `1: F0.0 B0.0`"),
        ("1f1b pp=1 vpp=1 microbatches=1 group=1\n0: F0.0", "pp rank 0 misses B0.0"),
        ("1f1b pp=1 vpp=1 microbatches=1 group=1\n0: F0.0 F0.0 B0.0", "pp rank 0 repeats F0.0"),
        ("1f1b pp=1 vpp=1 microbatches=1 group=1\n0: F0.0 B0.0 F1.0", "pp rank 0 has no place for F1.0"),
        ("1f1b pp=2 vpp=1 microbatches=2 group=2\n0: F0.0 B0.0 F1.0 B1.0", "1 lists of actions for pp = 2 ranks"),
        ("zigzag pp=1 vpp=1 microbatches=1 group=1\n0: F0.0 B0.0", "unknown schedule `zigzag`"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, what):
    with pytest.raises(PlanError) as error:
        parse_schedule(text)
    assert what in error.value.what


def test_svg_has_a_bar_for_each_action():
    schedule = build_schedule("interleaved_1f1b", 2, 4, 2)
    root = ElementTree.fromstring(schedule_svg(schedule, simulate(schedule)))
    bars = [element for element in root.iter() if element.tag.endswith("rect")]
    assert len(bars) == 2 * 2 * 4 * 2
