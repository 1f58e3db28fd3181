"""What ranks run to fail on purpose: one of them, at one place of its third step; the others only train and save."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from runtime.checkpoint import saver
from runtime.distributed.stopping import Stopping
from runtime.engine.engine import Engine
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.limits import HANG_SECONDS

SIZE, STEPS, FAILS_IN_STEP = 8, 4, 2
GROUPS_SECONDS = 2 * HANG_SECONDS  # no rank may wait for it: its launch would end before
LAYOUT = {"pp": 2, "dp": 2, "micro": 2}
PHASES = ("start", "forward", "backward", "update", "between", "save")
Fault = Callable[[], Any]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2 * HANG_SECONDS)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(2 * HANG_SECONDS)


def raise_key_error() -> None:
    {}["labels"]


FAULTS = {f.__name__: f for f in (kill, terminate, stop, hang, raise_key_error)}


def train_and_fail(
    failing: int, phase: str, fault: str, directory: str, timeout_seconds: float = GROUPS_SECONDS, layout: Any = None
) -> int:
    """``directory``: where the fault is marked, and saves are written. The number of steps."""
    rank, layout = int(os.environ["RANK"]), layout or LAYOUT

    def fail() -> None:
        (Path(directory) / "failed").touch()
        FAULTS[fault]()

    if rank == failing and phase == "start":
        fail()
    plan = build_plan(build_model(), size=SIZE, **layout)
    with Engine(plan, program=lower(plan, rank), timeout_seconds=timeout_seconds) as engine:
        for step in range(STEPS):
            if step == FAILS_IN_STEP and rank == failing:
                if phase == "between":
                    fail()
                arm(engine, phase, fail)
            engine.train_step(build_batch(SIZE))
        engine.save(Path(directory) / "saves")
        return STEPS


def arm(engine: Engine, phase: str, fail: Fault) -> None:
    """``fail`` is called the next time that the engine comes to ``phase``."""
    if phase == "forward":
        engine.program.stages[0].module.register_forward_pre_hook(lambda *_: fail())
    if phase == "backward":
        before(engine.executor, "before_backward", fail)
    if phase == "update":
        before(engine.optimizer, "step", fail)
    if phase == "save":
        before(saver, "write_pieces", fail)


def before(owner: Any, name: str, fail: Fault) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        fail()
        return real(*args, **options)

    setattr(owner, name, failing)


def has_failed(directory: Path) -> bool:
    return (directory / "failed").exists()


def train_with_a_slow_rank(slow: int, sleep_seconds: float, run_seconds: float) -> list[Any]:
    """One rank sleeps in each of its forwards. The last report's slow rank and usual seconds."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=6, dp=3)
    with Engine(plan, program=lower(plan, rank), timeout_seconds=HANG_SECONDS) as engine, Stopping():
        if rank == slow:
            engine.program.stages[0].module.register_forward_pre_hook(lambda *_: time.sleep(sleep_seconds))
        until, report = time.monotonic() + run_seconds, None
        while report is None or not report.stop_requested:
            report = engine.train_step(build_batch(6))
            if time.monotonic() > until and rank == 0:
                signal.raise_signal(signal.SIGTERM)
        return [report.slow_rank, report.usual_seconds]


BATCHES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "none": lambda batch: None,
    "a list": lambda batch: list(batch.values()),
    "other keys": lambda batch: {"x": batch["x"]},
    "other shape": lambda batch: {name: value[:-1] for name, value in batch.items()},
    "other dtype": lambda batch: {name: value.float() for name, value in batch.items()},
    "other rows": lambda batch: {name: value.roll(1, 0) for name, value in batch.items()},
}


def train_with_another_batch(odd: int, at_step: int, kind: str, directory: str) -> None:
    """Rank ``odd`` is given another batch. Each rank writes down its error."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=SIZE, pp=2)
    try:
        with Engine(plan, program=lower(plan, rank), timeout_seconds=GROUPS_SECONDS) as engine:
            for step in range(at_step + 1):
                batch: Any = build_batch(SIZE)
                engine.train_step(BATCHES[kind](batch) if step == at_step and rank == odd else batch)
    except PlanError as error:
        (Path(directory) / str(rank)).write_text(str(error))
        raise
