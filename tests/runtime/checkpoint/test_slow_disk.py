"""Rank 0 may write for longer than the groups' timeout: the others wait, and send when they are asked."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from planner import PlanError, plan
from runtime.engine.engine import Engine
from tests.tools.checkpoints import Own, assert_same, own_checkpoint, write
from tests.tools.pretrained_ranks import stored
from tests.tools.ranks import Ranks

TIMEOUT_SECONDS, WRITE_SECONDS = 12.0, 14.0
SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 2, "micro": 2},
    "inputs": {"ids": {"shape": [3], "dtype": "int64"}},
}
pytestmark = pytest.mark.slow


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
