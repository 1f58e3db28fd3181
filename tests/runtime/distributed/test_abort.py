"""A rank that fails ends by itself, whatever it has under way, and so do its peers: long before the groups' timeout."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from passes.errors import RunError
from runtime.distributed.launch import RankError, launch
from runtime.distributed.this_host import HOST
from runtime.engine.engine import Engine
from tests.tools.faulty_ranks import has_failed, train_and_fail
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.limits import HANG_SECONDS

SIZE = 8
TIMEOUT_SECONDS = 2 * HANG_SECONDS  # of groups: no rank may wait for it
pytestmark = pytest.mark.slow


def engine_that_fails(failing: int, layout: dict[str, Any]) -> Engine:
    """Its second forward raises on rank ``failing``, with a receive posted and a collective started."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=SIZE, **layout)
    engine = Engine(plan, program=lower(plan, rank), timeout_seconds=TIMEOUT_SECONDS)
    calls: list[Any] = []

    def fail(module: torch.nn.Module, inputs: Any) -> None:
        calls.append(dist.irecv(torch.ones(3), 1 - rank, group=engine.groups.host, tag=77))
        if len(calls) == 2:
            calls.append(dist.all_reduce(torch.ones(3), group=engine.groups.world, async_op=True))
            raise ArithmeticError("the forward went wrong")

    if rank == failing:
        engine.program.stages[0].module.register_forward_pre_hook(fail)
    return engine


def fail_in_a_step(failing: int, layout: dict[str, Any]) -> None:
    with engine_that_fails(failing, layout) as engine:
        engine.train_step(build_batch(SIZE))


def fail_without_with(failing: int, layout: dict[str, Any]) -> None:
    engine_that_fails(failing, layout).train_step(build_batch(SIZE))


def fail_in_init(failing: int, layout: dict[str, Any]) -> None:
    """One rank's weights cannot be taken; the other goes on into its first step."""
    plan = build_plan(build_model(), size=SIZE, **layout)
    rank = int(os.environ["RANK"])
    program: Any = lower(plan, rank)
    if rank == failing:
        program.stages = None
    with Engine(plan, program=program, timeout_seconds=TIMEOUT_SECONDS) as engine:
        engine.train_step(build_batch(SIZE))


def fail_in_close(failing: int, layout: dict[str, Any]) -> None:
    """One rank leaves with an error while the other waits for it at the end."""
    with engine_that_fails(-1, layout):
        if int(os.environ["RANK"]) == failing:
            raise ArithmeticError("the user's own code went wrong")


CASES = {
    "receives": ("fail_in_a_step", 1, {"pp": 2, "micro": 2}, "StepError: rank 1 .*stage 1.*the forward went wrong"),
    "sends": ("fail_in_a_step", 0, {"pp": 2, "micro": 2}, "StepError: rank 0 .*stage 0.*the forward went wrong"),
    "dp": ("fail_in_a_step", 1, {"dp": 2, "micro": 2}, "StepError: rank 1 .*the forward went wrong"),
    "without with": ("fail_without_with", 1, {"pp": 2, "micro": 2}, "StepError: rank 1 .*the forward went wrong"),
    "init": ("fail_in_init", 1, {"dp": 2, "micro": 2}, "TypeError: 'NoneType'"),
    "close": ("fail_in_close", 0, {"pp": 2, "micro": 2}, "ArithmeticError: the user's own code went wrong"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_plain_processes_end_by_themselves_with_the_ranks_own_error(case):
    """As torchrun starts them, but with nobody to end the peers. No abort of C++ code: that would be a signal."""
    function, failing, layout, told = CASES[case]
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    code = f"from tests.runtime.distributed.test_abort import *; {function}({failing}, {layout})"
    environment = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=HANG_SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    last = [line for line in errors[failing].splitlines() if "Error: " in line][-1]
    assert re.search(told, last), errors[failing]
    assert ("StepError" in told) == (">F1.0<" in errors[failing].partition(last)[2])
    last = errors[1 - failing].splitlines()[-1]  # the survivor's
    assert re.search(rf"rank {failing} \(tp 0 .*: {told.rpartition('.*')[2] or told}", last), errors[1 - failing]


def test_launched_ranks_show_the_step_error_of_the_one_that_failed():
    with pytest.raises(RankError, match=r"^rank 1 .*, stage 1, .*the forward went wrong"):
        launch(fail_in_a_step, 2, 1, {"pp": 2, "micro": 2}, timeout_seconds=HANG_SECONDS)


SHORT_SECONDS = 20.0  # the timeout of groups

DIED = "(killed by SIGKILL|its process has died)"
AT_STEP_3 = r", stage \d, step 3, microbatch \d, "
DEATHS: dict[str, tuple[int, str, str, tuple[Any, ...], str]] = {
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
    failing, phase, fault, more, _ = DEATHS[case]
    directory.mkdir()
    with pytest.raises(RankError) as caught:
        launch(train_and_fail, 4, failing, phase, fault, str(directory), *more, timeout_seconds=HANG_SECONDS)
    assert isinstance(caught.value, RunError)
    assert has_failed(directory)
    return caught.value.last_lines


def test_every_survivor_names_the_rank_and_what_it_was_at_in_its_last_line(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda named: last_lines(tmp_path / str(named[0]), named[1]), enumerate(DEATHS)))
    for (case, (failing, *_, told)), lines in zip(DEATHS.items(), ended, strict=True):
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
