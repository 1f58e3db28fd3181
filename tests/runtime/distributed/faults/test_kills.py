"""A rank that dies, stands still or raises is named by every other rank's last line, long before the groups' timeout.

The ranks (pp 2 · dp 2) train and save; one has a fault in its third step. Several launches run at once: most of their
time they wait.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from passes.errors import RunError
from runtime.distributed.launch import RankError, launch
from tests.tools.faulty_ranks import has_failed, train_and_fail
from tests.tools.limits import HANG_SECONDS

SHORT_SECONDS = 20.0  # the timeout of groups
pytestmark = pytest.mark.slow

DIED = "(killed by SIGKILL|its process has died)"
AT_STEP_3 = r", stage \d, step 3, microbatch \d, "
CASES: dict[str, tuple[int, str, str, tuple[Any, ...], str]] = {
    "killed at the start": (3, "start", "kill", (), rf"rank 3.*: {DIED}"),
    "killed in a forward": (
        0,
        "forward",
        "kill",
        (),
        rf"rank 0 \(tp 0 · pp 0 · dp 0\), stage 0, step 3, microbatch 0, forward \(F0.0\): {DIED}",
    ),
    "killed in a backward": (
        1,
        "backward",
        "kill",
        (),
        rf"rank 1 \(tp 0 · pp 0 · dp 1\), stage 0, step 3, microbatch 0, backward \(B0.0\): {DIED}",
    ),
    "killed in the update": (2, "update", "kill", (), rf"rank 2 \(tp 0 · pp 1 · dp 0\), step 3, update: {DIED}"),
    "killed in a save": (1, "save", "kill", (), rf"rank 1 \(tp 0 · pp 0 · dp 1\), step 4, save: {DIED}"),
    "ended by SIGTERM": (1, "forward", "terminate", (), r"rank 1 .*: killed by SIGTERM"),
    "stopped": (0, "backward", "stop", (), r"rank 0 .*: its process is stopped \(SIGSTOP\).*"),
    "raises in its loader": (
        2,
        "between",
        "raise_key_error",
        (),
        r"rank 2 .*, step 2, between steps: KeyError: 'labels'",
    ),
    "raises in a forward": (
        3,
        "forward",
        "raise_key_error",
        (),
        rf"rank 3 .*{AT_STEP_3}forward \(F\d.0\): KeyError: 'labels'",
    ),
    "raises in the update": (0, "update", "raise_key_error", (), r"rank 0 .*, step 3, update: KeyError: 'labels'"),
}


def last_lines(directory: Path, case: str) -> dict[int, str]:
    """Of each rank."""
    failing, phase, fault, more, _ = CASES[case]
    directory.mkdir()
    with pytest.raises(RankError) as caught:
        launch(train_and_fail, 4, failing, phase, fault, str(directory), *more, timeout_seconds=HANG_SECONDS)
    assert isinstance(caught.value, RunError)
    assert has_failed(directory)
    return caught.value.last_lines


def test_every_survivor_names_the_rank_and_what_it_was_at_in_its_last_line(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda named: last_lines(tmp_path / str(named[0]), named[1]), enumerate(CASES)))
    for (case, (failing, *_, told)), lines in zip(CASES.items(), ended, strict=True):
        assert lines.keys() == {0, 1, 2, 3}, case
        for rank in lines.keys() - {failing}:
            assert re.fullmatch(told, lines[rank]), (case, lines)


@pytest.mark.thorough
def test_a_rank_that_stands_still_is_named_with_its_line_after_the_groups_timeout(tmp_path):
    with pytest.raises(RankError) as caught:
        launch(train_and_fail, 4, 2, "forward", "hang", str(tmp_path), SHORT_SECONDS, timeout_seconds=HANG_SECONDS)
    told = rf"rank 2 \(tp 0 · pp 1 · dp 0\){AT_STEP_3}forward \(F\d.0\): stuck for \d+ s at faulty_ranks.py:\d+ in hang"
    lines = {rank: line for rank, line in caught.value.last_lines.items() if rank != 2}
    assert all(re.fullmatch(told, line) for line in lines.values()), lines
    assert has_failed(tmp_path)
