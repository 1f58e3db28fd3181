"""Runs that are killed, stopped or moved to another layout, and go on: the losses of a run that was never broken.

Every run trains examples/gpt.py with dropout; losses are read from the log, which the attempts of a run share.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime import Engine
from runtime.checkpoint.saves import saves_in
from runtime.distributed.launch import RankError, launch
from runtime.training.job import Job
from runtime.training.loop import run_rank
from runtime.training.options import AUTO
from tests.tools.limits import HANG_SECONDS

MODEL = """
import torch
from examples.gpt import GPT

def build():
    torch.manual_seed(0)
    return GPT(length=8, width=16, num_layers=2, num_heads=2, dropout={dropout})
"""


@dataclass(frozen=True)
class Blow:
    """What befalls a rank on its ``attempt``-th start, when it calls ``method`` of its engine the ``call``-th time."""

    attempt: int
    rank: int
    call: int
    method: str = "train_step"
    sign: int = signal.SIGKILL


def job_in(directory: Path, dropout: float = 0.1, **changes: Any) -> Job:
    """A run of 12 steps that saves after every 3, but for ``changes``."""
    model = directory / "model.py"
    model.write_text(MODEL.format(dropout=dropout))
    data = directory / "text.txt"
    data.write_bytes(bytes(random.Random(0).choices(range(32, 127), k=4000)))
    job = Job(f"{model}:build", str(spec_in(directory, {"tp": 2})), str(data), changes.pop("num_steps", 12))
    return replace(
        job, **{"log": str(directory / "log.jsonl"), "save": str(directory / "saves"), "save_every": 3} | changes
    )


def spec_in(directory: Path, mesh: dict[str, int]) -> Path:
    spec = {
        "mesh": mesh,
        "batch": {"global": 4, "micro": 2},
        "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 1e-2, "clip_grad_norm": 1.0, "schedule": {"kind": "cosine", "warmup": 2, "steps": 200}},
    }
    path = directory / f"{'-'.join(f'{axis}{n}' for axis, n in mesh.items())}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def run_with_blows(job: Job, blows: tuple[Blow, ...]) -> Any:
    """``run_rank``, with what shall happen to this rank on this start."""
    attempt, rank = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ["RANK"])
    for blow in blows:
        if (blow.attempt, blow.rank) == (attempt, rank):
            setattr(Engine, blow.method, _struck(getattr(Engine, blow.method), blow))
    return run_rank(job)


def _struck(method: Callable[..., Any], blow: Blow) -> Callable[..., Any]:
    calls = iter(range(1, 1_000_000))

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == blow.call:
            os.kill(os.getpid(), blow.sign)
        return method(*args, **kwargs)

    return struck


def run(job: Job, blows: tuple[Blow, ...] = (), num_ranks: int = 2, max_restarts: int = 0) -> list[float]:
    """The losses of the log, after the run."""
    launch(run_with_blows, num_ranks, job, blows, timeout_seconds=HANG_SECONDS, max_restarts=max_restarts)
    return losses(job)


def losses(job: Job) -> list[float]:
    assert job.log is not None
    rows = [json.loads(line) for line in Path(job.log).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(job_in(tmp_path_factory.mktemp("unbroken")))


def test_ranks_that_are_killed_are_started_again_and_lose_nothing(tmp_path: Path, unbroken: list[float]) -> None:
    """Once between saves, once while saving: the numbers are those of the unbroken run, bit for bit."""
    blows = (Blow(0, 1, 5), Blow(1, 0, 2, "save"))
    assert run(job_in(tmp_path), blows, max_restarts=2) == unbroken


@pytest.mark.thorough
def test_a_run_goes_on_by_itself_from_its_newest_good_save(tmp_path: Path, unbroken: list[float]) -> None:
    job = job_in(tmp_path)
    run(replace(job, num_steps=7))
    newest = saves_in(tmp_path / "saves")[-1]
    assert newest.name == "step-00000007"  # the end is saved too
    shard = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert run(replace(job, resume=AUTO)) == unbroken


@pytest.mark.thorough
def test_a_run_goes_on_in_other_layouts(tmp_path: Path) -> None:
    """tp 2, then pp 2, then dp 2 and one process, without dropout, whose places layouts do not share."""
    job = job_in(tmp_path, dropout=0.0, num_steps=3)
    run(job)
    for mesh, num_steps in (({"pp": 2}, 6), ({"dp": 2}, 9), ({"tp": 1}, 12)):
        moved = replace(job, spec=str(spec_in(tmp_path, mesh)), resume=AUTO, num_steps=num_steps)
        found = run(moved, num_ranks=mesh.get("tp", 2))
    alone = job_in(tmp_path, dropout=0.0, spec=moved.spec, save=None, save_every=None)
    assert found == pytest.approx(run(alone, num_ranks=1), rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["train_step", "save"])
def test_a_run_that_is_told_to_end_finishes_its_step_and_saves(
    tmp_path: Path, unbroken: list[float], method: str
) -> None:
    """SIGTERM of one rank, in a step and in a save: all ranks end alike, well, and with what they did on the disk."""
    job = job_in(tmp_path)
    done = run(job, (Blow(0, 1, 2, method, signal.SIGTERM),))
    assert 2 <= len(done) < 12
    assert done == unbroken[: len(done)]
    assert saves_in(tmp_path / "saves")[-1].name == f"step-{len(done):08d}"
    assert run(replace(job, resume=AUTO)) == unbroken


@pytest.mark.thorough
def test_only_so_many_saves_stay(tmp_path: Path) -> None:
    run(job_in(tmp_path, keep=2))
    assert [save.name for save in saves_in(tmp_path / "saves")] == ["step-00000009", "step-00000012"]


SHORT_SECONDS = 20.0  # ranks plan each in its own time before they meet


def run_and_hang(job: Job) -> Any:
    if os.environ["RANK"] == "1":
        Engine.train_step = lambda *_, **__: time.sleep(2 * HANG_SECONDS)  # pyright: ignore[reportAttributeAccessIssue]
    return run_rank(job)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_timeout_of_a_run_is_that_of_its_groups(tmp_path: Path) -> None:
    """A rank that hangs is named when it is over, not after ten minutes."""
    with pytest.raises(RankError, match=r"rank 1 .*: stuck for \d+ s at test_resume.py"):
        launch(run_and_hang, 2, job_in(tmp_path, timeout=SHORT_SECONDS), timeout_seconds=HANG_SECONDS)


@pytest.mark.thorough
@pytest.mark.slow
def test_two_hundred_steps_with_kills_at_random_give_the_same_losses(tmp_path: Path) -> None:
    """A rank drawn by chance is killed after a number of steps drawn by chance, five times."""
    draw = random.Random(1)
    blows = tuple(Blow(attempt, draw.randrange(2), draw.randrange(10, 50)) for attempt in range(5))
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = run(job_in(tmp_path / "whole", num_steps=200, save_every=None))
    broken = run(job_in(tmp_path / "broken", num_steps=200, save_every=10), blows, max_restarts=5)
    assert len(whole) == 200
    assert broken == whole
