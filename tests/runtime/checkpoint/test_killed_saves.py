"""A save that is killed at any of its operations leaves the old save or the new one, whole, and nothing between."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from runtime.checkpoint.saves import owned, resolve, saves_in, verify
from runtime.fuzz.forks import ForkError, in_fork
from tests.tools.laboratory import Case, Lab
from tests.tools.resumed import die_in_a_save
from tests.tools.small_saves import die_before, newest_intact, num_operations, save


def count(directory: Path, step: int) -> int:
    return num_operations(lambda: save(directory, step, 2.0))


@pytest.mark.thorough
@pytest.mark.parametrize("step", [2, 1], ids=["the next step", "the same step again"])
def test_a_kill_at_every_operation_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    save(tmp_path / "dry", 1, 1.0)
    operations = in_fork(count, tmp_path / "dry", step)
    assert operations >= 20
    seen = []
    for number in range(1, operations + 1):
        run = tmp_path / str(number)
        save(run, 1, 1.0)
        die_before(number, partial(save, run, step, 2.0))
        found = verify(resolve(run))
        seen.append(found.extra["value"])
        assert found.step == (1 if seen[-1] == 1.0 else step)
        intact, skipped = newest_intact(run)
        assert intact is not None
        assert skipped == []
        if number % 4 == 0:
            assert_nothing_hinders(run)
    assert seen == sorted(seen)
    assert set(seen) == {1.0, 2.0}


def assert_nothing_hinders(run: Path) -> None:
    """What a killed save left is in nobody's way, and gone with the next owner."""
    save(run, 3, 3.0)
    assert verify(resolve(run)).step == 3
    with owned(run):
        saves = {f"step-{step:08d}" for step in (1, 2, 3)}
        assert {path.name for path in run.iterdir()} <= {*saves, "latest", ".lock"}


@pytest.mark.thorough
def test_a_kill_of_the_first_save_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    operations = in_fork(count, tmp_path / "dry", 1)
    for number in range(1, operations + 1, 2):
        run = tmp_path / str(number)
        die_before(number, partial(save, run, 1, 2.0))
        for found in saves_in(run):
            assert verify(found).extra == {"value": 2.0}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
def test_a_rank_that_dies_in_a_save_ends_all_and_the_save_before_stays(lab: Lab, tmp_path: Path, wait: bool) -> None:
    with pytest.raises(ForkError) as caught:
        lab.run(Case("gpt", {"dp": 2}, job=die_in_a_save, job_arguments=(tmp_path, wait)))
    assert "not finished" not in str(caught.value)
    assert [save.name for save in saves_in(tmp_path)] == ["step-00000001"]
    assert verify(resolve(tmp_path)).step == 1
    assert newest_intact(tmp_path) == (tmp_path / "step-00000001", [])
