"""A schedule by hand: ``pipeline.schedule`` of a spec as a text, or the name of its file."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.gpt import GPT
from passes.errors import PlanError, SpecError
from planner import capture, plan
from planner.commands.cli import app, format_plan
from planner.fold import LOOP, V
from planner.pipeline.schedule import CUSTOM, build_schedule
from planner.pipeline.simulate import format_schedule, parse_schedule, simulate
from planner.spec.spec import Spec
from tests.tools.paths import ROOT
from tests.tools.pipeline_cases import NUM_ELEMENTS, run_schedule
from tests.tools.scale_stages import scale_loss
from tests.tools.schedules import both_ways, drawn_schedule

BASE: dict[str, Any] = {
    "mesh": {"pp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"ids": {"shape": [8], "dtype": "int64", "high": 50}, "labels": {"like": "ids"}},
}
TEXT = """\
# by hand
custom pp=2 vpp=1 microbatches=2
0: F0.0 F1.0 B0.0 B1.0  # the first stage
1: F0.0 B0.0 F1.0 B1.0
"""


def spec_of(schedule: Any, **changes: Any) -> Spec:
    return Spec.load({**BASE, **changes, "pipeline": {"schedule": schedule}})


def refused(schedule: Any, **changes: Any) -> str:
    with pytest.raises(SpecError) as error:
        spec_of(schedule, **changes)
    return str(error.value)


def test_a_spec_has_the_content_of_the_file_and_not_its_path(tmp_path: Path) -> None:
    (tmp_path / "order.txt").write_text(TEXT)
    (tmp_path / "spec.yaml").write_text(
        "mesh: {pp: 2}\nbatch: {global: 4, micro: 2}\npipeline: {schedule: {file: order.txt}}\n"
        "inputs: {ids: {shape: [8], dtype: int64, high: 50}, labels: {like: ids}}\n"
    )
    spec = Spec.load(tmp_path / "spec.yaml")
    assert spec == spec_of(TEXT) == spec_of({"file": str(tmp_path / "order.txt")}) == Spec.load(spec.to_dict())
    assert_expected_inline(
        spec.to_dict()["pipeline"]["schedule"],
        """\
custom pp=2 vpp=1 microbatches=2 group=2
0: F0.0 F1.0 B0.0 B1.0
1: F0.0 B0.0 F1.0 B1.0
""",
    )
    (tmp_path / "order.txt").write_text(TEXT.replace("F1.0 B0.0 B1.0", "B0.0 F1.0 B1.0"))
    assert Spec.load(tmp_path / "spec.yaml") != spec


def test_a_file_is_wrong_in_one_error_with_its_line(tmp_path: Path) -> None:
    def error(old: str, new: str) -> str:
        (tmp_path / "order.txt").write_text(TEXT.replace(old, new))
        return refused({"file": str(tmp_path / "order.txt")})

    assert_expected_inline(
        error("F1.0 B0.0 B1.0", "F1.0 B0.0"),
        """\
schedule: pp rank 0 misses B1.0
  at:  order.txt:3, `0: F0.0 F1.0 B0.0`
  fix: run each microbatch's forward and backward exactly once on each chunk, and a W for all or none""",
    )
    assert_expected_inline(
        error("F0.0 B0.0 F1.0", "B0.0 F0.0 F1.0"),
        """\
schedule custom (pp = 2, vpp = 1, 2 microbatches) deadlocks at step 2
  step  rank0 rank1
  0     F0.0  .
  1     F1.0  .
  rank 0: B0.0 waits for B0.0 of rank 1
  rank 1: B0.0 waits for F0.0 of rank 1
  at:  order.txt:3, `0: F0.0 F1.0 B0.0 B1.0`
  fix: in the lists of their ranks, move the awaited actions before the waiting ones""",
    )
    assert_expected_inline(
        error("F0.0 F1.0", "F1.0 F0.0"),
        """\
schedule custom (pp = 2, vpp = 1, 2 microbatches): rank 0 sends values in another order than rank 1 receives them, from message 0 on
  rank 0 sends them by   F1.0 F0.0
  rank 1 needs them for  F0.0 F1.0
  at:  order.txt:4, `1: F0.0 B0.0 F1.0 B1.0`
  fix: list these actions of rank 1 in the order in which rank 0 runs its own""",  # noqa: E501
    )
    assert "rank 0 misses W0.0 W1.0\n  at:  order.txt:3, " in error("F1.0 B1.0\n", "F1.0 B1.0 W1.0\n")
    assert "`G1.0` is not an action\n  at:  order.txt:4, " in error("F1.0 B1.0\n", "G1.0 B1.0\n")
    assert "begins with `2: F0.0 B0.0 F1.0 B1`\n  at:  order.txt:4, " in error("1: ", "2: ")
    assert "2 lists of actions for pp = 3 ranks\n  at:  order.txt:2, " in error("pp=2", "pp=3")
    assert "not with its sizes\n  at:  order.txt:2, " in error("vpp=1", "vpp=0")
    assert "more than 262144 actions\n  at:  order.txt:2, " in error("microbatches=2", "microbatches=999999999")
    assert "begins with ``, not with its sizes" in error(TEXT, "")


def test_a_text_in_the_spec_is_wrong_at_its_key(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        "mesh: {pp: 2}\nbatch: {global: 4, micro: 2}\ninputs: {ids: {shape: [8], dtype: int64, high: 50}}\n"
        "pipeline:\n  schedule: |\n    custom pp=2 vpp=1 microbatches=2\n    0: F0.0 F1.0 B0.0\n    1: F0.0\n"
    )
    with pytest.raises(SpecError, match=r"misses B1.0\n  at:  spec.yaml:5, `0: F0.0 F1.0 B0.0`"):
        Spec.load(tmp_path / "spec.yaml")
    assert "pipeline.schedule:2, `0: F0.0`" in refused("custom pp=1 vpp=1 microbatches=1\n0: F0.0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": {"pp": 3}}, "is for pp 2, vpp 1, 2 microbatches, and the spec has pp 3, vpp 1, 2 microbatches\n"),
        ({"mesh": {"pp": 2, "vpp": 2}}, "is for pp 2, vpp 1, 2 microbatches, and the spec has pp 2, vpp 2, 2"),
        ({"batch": {"global": 8, "micro": 2}}, "is for pp 2, vpp 1, 2 microbatches, and the spec has pp 2, vpp 1, 4"),
        ({"mesh": "auto"}, "a schedule by hand is for one mesh and one number of microbatches, and a search chooses"),
        ({"mesh": {"tp": "auto", "pp": 2}}, "a schedule by hand is for one mesh and one number of microbatches"),
        (
            {
                "batch": {"tokens": 64, "micro": 2},
                "inputs": {"ids": {"shape": [[8, 16]], "high": 50, "dtype": "int64"}},
            },
            "and the spec has pp 2, vpp 1, 4 microbatches at length 8\n",
        ),
    ],
    ids=str,
)
def test_its_sizes_are_those_of_the_spec(changes: dict[str, Any], words: str) -> None:
    assert words in refused(TEXT, **changes)


def test_words_that_are_no_schedule_are_refused() -> None:
    assert "pipeline.schedule cannot be the string '1f2b'" in refused("1f2b")
    assert "did you mean '1f1b'? choose one of: gpipe" in refused("1f2b")
    assert "pipeline.schedule cannot be 3" in refused(3)
    assert "pipeline.schedule cannot be a mapping" in refused({"path": "order.txt"})
    assert "there is no schedule file no.txt" in refused({"file": "no.txt"})
    with pytest.raises(SpecError, match=r"pipeline.group_size: a schedule by hand has no groups"):
        Spec.load({**BASE, "pipeline": {"schedule": TEXT, "group_size": 2}})


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (2, 7), (4, 8), (4, 11), (8, 16)])
def test_an_order_of_both_directions_runs_to_its_end(pp: int, count: int) -> None:
    found = both_ways(pp, count)
    bubble = simulate(found).bubble_fraction
    assert parse_schedule(format_schedule(found)) == found
    assert simulate(build_schedule("zero_bubble_v", pp, count, 2)).bubble_fraction <= bubble < 0.1


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 2), st.integers(1, 4), st.booleans(), st.booleans()
)  # fmt: skip
def test_an_order_that_is_drawn_trains_as_any_or_is_refused(
    seed: int, pp: int, vpp: int, count: int, folded: bool, has_weights: bool
) -> None:
    schedule = drawn_schedule(seed, pp, vpp, count, V if folded else LOOP, has_weights=has_weights)
    try:
        simulate(schedule)
    except PlanError as error:
        assume("in another order than rank" not in error.what)  # of the messages of a link
        raise
    ran = run_schedule(schedule)
    assert not ran.stuck
    loss = scale_loss(pp * vpp, count, NUM_ELEMENTS)
    assert sum(rank.loss for rank in ran.results) == sum(rank.evaluated for rank in ran.results) == loss
    assert {g for rank in ran.results for g in rank.gradients} == {loss / 2}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_a_mutated_list_is_refused_or_is_another_order_of_the_same_actions(seed: int, data: st.DataObject) -> None:
    """None of them trains less: an action is lost, doubled, or moved where there is no place for it."""
    lines = [line.split() for line in format_schedule(both_ways(2, 4)).splitlines()]
    order = lines[data.draw(st.integers(1, 2))]
    at, other = (data.draw(st.integers(1, len(order) - 1)) for _ in range(2))
    change = data.draw(st.sampled_from(["lost", "doubled", "overwritten", "swapped"]))
    if change == "lost":
        del order[at]
    elif change == "doubled":
        order.insert(other, order[at])
    elif change == "overwritten":
        order[at] = order[other]
    else:
        order[at], order[other] = order[other], order[at]
    text = "\n".join(map(" ".join, lines))
    mesh, batch = {"pp": 2, "vpp": 2}, {"global": 4, "micro": 1}
    try:
        found = spec_of(text, mesh=mesh, batch=batch).pipeline.schedule
    except SpecError as error:
        (line,) = re.findall(r"at:  pipeline.schedule:(\d), `\d: ", str(error))
        assert int(line) in (2, 3)
        return
    assert change == "swapped" or at == other
    assert not isinstance(found, str)
    assert found.kind == CUSTOM
    assert [sorted(of) for of in found.orders] == [sorted(of) for of in both_ways(2, 4).orders]
    assert not run_schedule(found).stuck


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "vpp"), [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("zero_bubble_v", 2)])
def test_memory_and_cost_are_those_of_the_kind_with_these_actions(kind: str, vpp: int) -> None:
    spec: dict[str, Any] = {
        "mesh": {"pp": 2, "vpp": vpp, "dp": 2},
        "batch": {"global": 16, "micro": 2},
        "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 64}, "targets": {"like": "input_ids"}},
        "cluster": str(ROOT / "specs/clusters/dgx-h100.yaml"),
    }
    captured = capture(GPT(vocabulary=64, length=8, width=16, num_heads=2), spec | {"mesh": {}})
    of_kind = plan(captured, spec | {"pipeline": {"schedule": kind}})
    text = format_plan(of_kind, "schedule")
    by_hand = plan(captured, spec | {"pipeline": {"schedule": text}})
    assert by_hand.spec["pipeline"]["schedule"] == format_plan(by_hand, "schedule") == text
    assert replace(by_hand.schedule, kind=kind) == of_kind.schedule
    assert by_hand.memory == of_kind.memory
    assert by_hand.cost is not None and of_kind.cost is not None  # noqa: PT018
    assert asdict(by_hand.cost) == pytest.approx(asdict(of_kind.cost), rel=1e-6)


def test_a_search_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        "mesh: auto\nbatch: {global: 4, micro: 2}\ninputs: {ids: {shape: [8], dtype: int64, high: 50}}\n"
        "pipeline: {schedule: {file: order.txt}}\ndevices: 2\n"
    )
    (tmp_path / "order.txt").write_text(TEXT)
    run = CliRunner().invoke(app, ["search", "examples/gpt.py:build", str(tmp_path / "spec.yaml")])
    assert run.exit_code == 2
    assert "a search chooses them\n  at:  spec.yaml:4\n" in run.stderr
