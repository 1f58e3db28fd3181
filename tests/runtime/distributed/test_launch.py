"""Local ranks start with torchrun's environment, hand back results, and end together."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from passes.errors import PlanError
from runtime.distributed.launch import RankError, launch
from tests.tools.limits import HANG_SECONDS

pytestmark = pytest.mark.slow


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(total), torch.get_num_threads()


def test_results_come_back_in_rank_order_from_ranks_of_one_thread():
    assert launch(sum_of_ranks, 3, 10, timeout_seconds=HANG_SECONDS) == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]


def refuse_on_rank_1(directory: str) -> None:
    (Path(directory) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise PlanError("tp divides nothing", where="spec.yaml:3", fix="use tp 1")
    time.sleep(2 * HANG_SECONDS)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.thorough
def test_a_plan_error_of_one_rank_comes_back_whole_and_ends_all_ranks(tmp_path):
    with pytest.raises(PlanError) as caught:
        launch(refuse_on_rank_1, 2, str(tmp_path), timeout_seconds=HANG_SECONDS)
    assert str(caught.value) == "tp divides nothing\n  at:  spec.yaml:3\n  fix: use tp 1"
    assert not any(is_running(int(path.read_text())) for path in tmp_path.iterdir())


def fail_in_a_collective() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the first cause")
    dist.barrier()


def test_the_first_cause_is_shown_not_the_peers_that_lost_it():
    with pytest.raises(RankError, match=r"^rank 1: ValueError: the first cause\n  at:  test_launch.py:"):
        launch(fail_in_a_collective, 2, timeout_seconds=HANG_SECONDS)


def die_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * HANG_SECONDS)


@pytest.mark.thorough
def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(RankError, match=r"^rank 1: killed by SIGKILL$"):
        launch(die_on_rank_1, 2, timeout_seconds=HANG_SECONDS)


SHORT_SECONDS = 1.0


def test_ranks_that_take_too_long_are_ended():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in 1 s and were terminated"):
        launch(time.sleep, 2, 2 * HANG_SECONDS, timeout_seconds=SHORT_SECONDS)


def hear_no_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that was only just forked, on a busy machine
    time.sleep(2 * HANG_SECONDS)


@pytest.mark.thorough
def test_ranks_that_are_killed_at_the_end_of_their_time_have_not_died_by_themselves():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in 1 s and were terminated") as caught:
        launch(hear_no_sigterm, 2, timeout_seconds=SHORT_SECONDS)
    assert caught.value.last_lines == {0: "ended by its launcher", 1: "ended by its launcher"}


def complain_when_ended() -> None:
    signal.signal(signal.SIGTERM, complain)
    time.sleep(2 * HANG_SECONDS)


def complain(number: int, frame: object) -> None:
    raise ValueError("a peer is gone")


@pytest.mark.thorough
def test_ranks_that_complain_when_their_time_is_over_have_not_failed_by_themselves():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in 4 s and were terminated"):
        launch(complain_when_ended, 2, timeout_seconds=4 * SHORT_SECONDS)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(RankError, match=r"^rank 0: .*pickle"):
        launch(make_a_lambda, 1, timeout_seconds=HANG_SECONDS)


def make_a_lambda():
    return lambda: None


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
