"""A pipeline on few cores: run action by action, beside what must hold for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.seconds.pipeline import run_pipeline
from planner.cost.seconds.shared import run_on_cores
from planner.pipeline.schedule import build_schedule
from tests.tools.examples import examples


def seconds(cores: float, pp: int = 2, count: int = 2, vpp: int = 1, kind: str = "1f1b") -> float:
    stages = pp * vpp
    return run_on_cores(build_schedule(kind, pp, count, vpp).orders, [1.0] * stages, [2.0] * stages, cores)


def test_a_core_for_each_rank_is_the_plain_pipeline():
    assert seconds(2) == seconds(9) == 9.0  # 2 microbatches of 3 s on each rank, and 3 s of bubble


def test_one_core_does_all_work_one_after_the_other_without_a_bubble():
    assert seconds(1) == 12.0
    assert seconds(0.5) == 24.0


def test_a_bubble_is_shorter_where_the_others_have_the_core():
    four = seconds(2, pp=4, count=4)
    assert 4 * 4 * 3 / 2 <= four < 2 * seconds(4, pp=4, count=4)


@examples(60)
@given(
    st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]),
    st.integers(1, 3),
    st.sampled_from(["gpipe", "1f1b"]),
    st.floats(0.3, 6),
    st.data(),
)
def test_no_more_work_than_cores_do_and_no_faster_than_alone(shape, groups, kind, cores, data):
    pp, vpp = shape
    kind, count = ("interleaved_1f1b" if vpp > 1 else kind), groups * pp
    forward, backward = (data.draw(st.lists(st.floats(0.1, 3), min_size=pp * vpp, max_size=pp * vpp)) for _ in range(2))
    found = run_on_cores(build_schedule(kind, pp, count, vpp).orders, forward, backward, cores)
    alone = run_pipeline(kind, pp, vpp, count, forward, backward).seconds
    work = count * (sum(forward) + sum(backward))
    assert found >= alone * (1 - 1e-6)
    assert found >= work / cores * (1 - 1e-6) or cores > pp
    assert found <= max(1.0, pp / cores) * alone * (1 + 1e-6)
    if cores >= pp:
        assert found == pytest.approx(alone)
