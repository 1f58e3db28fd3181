"""Saves that cannot be written, are killed or take long: one error on every rank, whole saves, and training goes on."""

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner import PlanError, plan
from runtime.checkpoint.manifest import json_of
from runtime.checkpoint.saves import check_writable, owned, prune, resolve, saves_in, verify
from runtime.engine.engine import Engine
from runtime.fuzz.forks import ForkError, in_fork
from tests.tools.checkpoints import Own, assert_same, own_checkpoint, write
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT
from tests.tools.pretrained_ranks import stored
from tests.tools.ranks import Ranks
from tests.tools.resumed import (
    die_in_a_save,
    fail_in_the_background_at_the_end,
    load_what_does_not_fit,
    save_on_a_full_disk,
    tied_copies,
    train_and_save,
)
from tests.tools.small_saves import die_before, newest_intact, num_operations, save

FULL = "cannot write the checkpoint: File too large"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_one_error_on_all(lab: Lab, tmp_path: Path, rank: int, wait: bool) -> None:
    run = tmp_path / "run"
    found = lab.run(Case("gpt", {"dp": 2}, job=save_on_a_full_disk, job_arguments=(run, rank, wait)))
    told = [result["error"] for result in found]
    assert told[rank].startswith(FULL)
    assert told[1 - rank] == f"rank {rank}: {told[rank]}"
    assert str(run) in told[rank]
    for result in found:
        assert result["left"] == ["latest", "step-00000001"]
    assert verify(resolve(run)).step == found[0]["step"] == (3 if wait else 4)


@pytest.mark.slow
def test_the_end_of_an_engine_raises_what_a_background_save_met(lab: Lab, tmp_path: Path) -> None:
    case = Case("gpt", {"dp": 2}, job=fail_in_the_background_at_the_end, job_arguments=(tmp_path / "run",))
    assert lab.run(case) == [(f"rank 1: {FULL}", True), (FULL, True)]
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_tied_weights_are_bit_identical_after_steps_and_after_a_resume(lab: Lab, tmp_path: Path) -> None:
    mesh = {"tp": 2, "pp": 2, "dp": 2}
    found = lab.run(Case("gpt", mesh, job=tied_copies, job_arguments=(tmp_path / "run",)))
    for after in (0, 1):
        for tp in (0, 1):
            copies = [held[after][0] for held in found if held[after][1] == tp]
            assert len(copies) == 4
            assert len(set(copies)) == 1
    assert len({held[0] for held in found[0]}) == 2


@pytest.mark.thorough
@pytest.mark.slow
def test_the_save_of_another_model_is_refused_by_name_on_every_rank(lab: Lab, tmp_path: Path) -> None:
    lab.run(Case("gpt", {"dp": 1}, job=train_and_save, job_arguments=(tmp_path,)))
    half = {"precision": {"parameters": "bfloat16"}}
    for model, rest, words in [
        ("gpt-5-layers", {}, "absent: blocks.4.norm1.weight"),
        ("gpt-5-layers", {}, "tokens.weight has shape [97, 32], the model has [257, 32]"),
        ("gpt", half, "tokens.weight is float64, the model has bfloat16"),
    ]:
        found = lab.run(Case(model, {"dp": 2}, rest, job=load_what_does_not_fit, job_arguments=(tmp_path,)))
        assert len(set(found)) == 1
        told, is_as_before = found[0]
        assert "the save is of another model" in told
        assert words in told
        assert is_as_before


# ---- directories


def as_nobody(directory: Path) -> str:
    os.setuid(65534)
    try:
        check_writable(directory)
    except PlanError as error:
        return str(error)
    return ""


def test_a_read_only_directory_is_told_before_anything_starts(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match=r"cannot write saves here: (File exists|Not a directory)"):
        check_writable(tmp_path / "file")
    if os.getuid() == 0:
        assert "cannot write saves here: Permission denied" in in_fork(as_nobody, tmp_path / "run")


def hold(directory: Path) -> subprocess.Popen[str]:
    """Another process that owns the directory until it is killed."""
    code = (
        "import sys, time\nfrom runtime.checkpoint.saves import owned\n"
        f"with owned(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep({2 * HANG_SECONDS})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.thorough
def test_a_second_run_on_one_directory_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    first = hold(tmp_path)
    try:
        with pytest.raises(PlanError, match=f"another run is writing here: process {first.pid} on "), owned(tmp_path):
            pass
    finally:
        first.kill()
        first.wait(HANG_SECONDS)
    with owned(tmp_path):  # what the dead one left hinders nobody
        assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
    with owned(tmp_path):
        pass


def test_what_killed_saves_left_is_removed_by_the_next_owner(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.abc.partial").mkdir()
    (tmp_path / ".step-00000007.abc.partial" / "rank-00000.safetensors").touch()
    with owned(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_old_saves_are_pruned_and_the_last_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 30, 4):
        save(tmp_path, step, float(step))
    assert [path.name for path in saves_in(tmp_path)] == [f"step-{step:08d}" for step in (1, 2, 4, 30)]
    assert [path.name for path in prune(tmp_path, 1)] == ["step-00000001", "step-00000002"]
    assert resolve(tmp_path).name == "step-00000004"  # what was written last, though another has more steps
    assert newest_intact(tmp_path) == (tmp_path / "step-00000004", [])
    save(tmp_path, 31, 31.0)
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000004"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000030", "step-00000031", "latest"}
    (tmp_path / "latest").write_text("damaged")
    assert [path.name for path in prune(tmp_path, 1)] == ["step-00000030"]
    with pytest.raises(PlanError, match="keep is 0"):
        prune(tmp_path, 0)


@pytest.mark.parametrize("extra", [{"x": math.nan}, {"x": math.inf}, {"x": {1, 2}}, {"x": b"1"}, 5], ids=str)
def test_what_json_does_not_hold_is_refused(extra: Any) -> None:
    with pytest.raises(PlanError, match="extra cannot be stored as JSON"):
        json_of(extra)


def test_extra_comes_back_as_json() -> None:
    assert json_of({"a": (1, 2.5, None), "b": {"c": "ü"}}) == json.loads('{"a": [1, 2.5, null], "b": {"c": "ü"}}')
    assert json_of(None) == {}


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_a_lock_that_is_no_file_is_one_error(tmp_path: Path, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run" / ".lock"
    victim.write_text("precious")
    path.parent.mkdir()
    {"link": lambda: path.symlink_to(victim), "directory": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(PlanError, match=f"cannot lock the directory of saves: .lock is a {kind}"), owned(path.parent):
        pass
    assert victim.read_text() == "precious"


def test_a_link_beside_latest_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("latest", ".latest.partial", ".step-00000001.pruned.partial"):
        (run / name).symlink_to(victim)
    for step in (1, 2):
        save(run, step, 1.0)
    prune(run, 1)
    assert resolve(run).name == "step-00000002"
    assert victim.read_text() == "precious"
    with owned(run):
        assert [path.name for path in run.glob(".*.partial")] == []


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


TIMEOUT_SECONDS, WRITE_SECONDS = 12.0, 14.0
SPEC = {"mesh": {"tp": 2}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": {"shape": [3], "dtype": "int64"}}}


def save_slowly(source: str, target: str, disk_is_full: bool) -> str:
    """The first and the last of four files take longer on their way to the disk than ranks wait for anything else."""
    disk, num_syncs = os.fsync, 0

    def slow(handle: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        if num_syncs in (1, 4):
            time.sleep(WRITE_SECONDS)
        if disk_is_full and num_syncs == 2:
            raise OSError(28, "No space left on device")
        disk(handle)

    decided = plan(Own(), SPEC)
    _together(Path(source))  # planning takes each rank its own time, more than the groups would wait
    os.fsync = slow
    told = ""
    with Engine(decided, timeout_seconds=TIMEOUT_SECONDS) as engine:
        engine.load_pretrained(source)
        try:
            engine.save_pretrained(target, max_shard_bytes=80)
        except PlanError as error:
            told = error.what
    return told


def _together(directory: Path) -> None:
    (directory / f"rank{os.environ['RANK']}").touch()
    while len(list(directory.glob("rank*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("disk_is_full", [False, True], ids=["written", "full"])
def test_peers_wait_for_a_slow_disk_beyond_the_groups_timeout(tmp_path, disk_is_full):
    source = write(tmp_path / "in", own_checkpoint())
    told = Ranks(2, "processes").run(save_slowly, str(source), str(tmp_path / "out"), disk_is_full)
    if disk_is_full:
        assert told == ["No space left on device", "rank 0: No space left on device"]
        assert not (tmp_path / "out").exists()
    else:
        assert told == ["", ""]
        assert_same(stored(tmp_path / "out"), own_checkpoint())
