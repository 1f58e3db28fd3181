"""Ranks that failed start again, all of them; bad input and a second failure do not. What the caller learns of it."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from passes.errors import PlanError
from runtime.distributed.launch import RankError, launch
from tests.tools.limits import HANG_SECONDS

pytestmark = pytest.mark.slow


def die_in_the_first_attempts(failing: int) -> tuple[int, int]:
    """Rank 1 is killed in a collective of the first ``failing`` attempts."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    total = torch.tensor([attempt])
    if attempt < failing and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return attempt, int(total)


@pytest.mark.thorough
def test_ranks_start_again_until_one_attempt_is_good(capfd):
    told: list[tuple[int, str]] = []
    results = launch(
        die_in_the_first_attempts,
        2,
        2,
        timeout_seconds=HANG_SECONDS,
        max_restarts=3,
        on_restart=lambda number, failure: told.append((number, failure)),
    )
    assert results == [(2, 4)] * 2
    assert [number for number, _ in told] == [1, 2]
    assert all("rank 1" in failure for _, failure in told)
    errors = capfd.readouterr().err
    assert "restart 1 of 3" in errors
    assert "restart 2 of 3" in errors


def test_one_failure_more_than_restarts_is_the_error():
    with pytest.raises(RankError, match="rank 1"):
        launch(die_in_the_first_attempts, 2, 2, timeout_seconds=HANG_SECONDS, max_restarts=1)


def refuse() -> None:
    raise PlanError(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", fix="none")


def test_bad_input_is_not_tried_again():
    with pytest.raises(PlanError, match="attempt 0"):
        launch(refuse, 1, timeout_seconds=HANG_SECONDS, max_restarts=3)
