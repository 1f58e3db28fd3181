"""A signal ends a loop of steps after the same step on every rank; one to the launching process reaches the ranks."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.distributed.faults.activity import Page, own_page
from runtime.distributed.launch import STANDSTILL_SECONDS, RankError, Standstill, launch
from runtime.distributed.rank_process import Outbox, Outcome
from runtime.distributed.stopping import Stopping, stop_requested
from runtime.engine.engine import Engine
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.limits import HANG_SECONDS

SIZE, STEPS = 8, 1_000_000  # more than run before any signal


@pytest.fixture(autouse=True)
def heeded():
    """A process that was started in the background ignores Ctrl-C; these tests are of one that does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_inside_a_signal_is_noted_and_outside_it_is_what_it_was():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stopping() as stopping:
        assert stop_requested() is None
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop_requested() == signal.SIGINT
        assert stopping.agreed(SimpleNamespace(stop_requested=True))
    assert stop_requested() is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_later_ctrl_c_interrupts(monkeypatch):
    monkeypatch.setattr("runtime.distributed.stopping.SAME_SECONDS", -1.0)
    with Stopping():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def step_until_told(directory: str, signalled: int | None) -> int:
    """The number of steps that this rank ran; rank ``signalled`` sends itself SIGTERM after its third."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=SIZE, dp=2, micro=2)
    with Engine(plan, program=lower(plan, rank), timeout_seconds=HANG_SECONDS) as engine, Stopping() as stopping:
        (Path(directory) / f"{rank}").write_text("steps")
        for step in range(1, STEPS):
            report = engine.train_step(build_batch(SIZE))
            if step == 3 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            if signalled is None:
                time.sleep(0.05)  # the test's own signal needs the processor too
            if stopping.agreed(report):
                return step
    return STEPS


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    assert launch(step_until_told, 2, str(tmp_path), 1, timeout_seconds=HANG_SECONDS) == [4, 4]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """The path of a socket has at most 107 characters, and that of ``tmp_path`` is long."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def wait_for_ever(directory: str) -> None:
    (Path(directory) / os.environ["RANK"]).write_text("waits")
    time.sleep(2 * HANG_SECONDS)


def started(job: str, arguments: str, path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that launches two ranks of ``job``, once both are at work; and its directory for temporary files."""
    marks, temporary = path / "marks", path / "temporary"
    marks.mkdir(parents=True)
    temporary.mkdir()
    code = f"from tests.runtime.distributed.test_stopping import *; print(launch({job}, 2, {str(marks)!r}{arguments}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(path)},  # torch keeps it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(marks.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, temporary


def assert_nothing_is_left(process: subprocess.Popen[str], temporary: Path) -> None:
    """Neither a process of its session nor a file."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        found = subprocess.run(["ps", "-o", "pid=,args=", "-s", str(process.pid)], capture_output=True, text=True)
        left = found.stdout + "".join(map(str, temporary.iterdir()))
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("to_all", [False, True], ids=["alone", "and of all its processes"])
def test_a_signal_of_a_scheduler_lets_ranks_finish_their_step_and_return(short_path, to_all: bool, number: int):
    process, temporary = started("step_until_told", ", None", short_path)
    os.killpg(process.pid, number) if to_all else process.send_signal(number)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    first, second = eval(out)
    assert first == second < STEPS
    assert_nothing_is_left(process, temporary)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_signal_to_the_launcher_leaves_no_process_and_no_file(short_path):
    codes = {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}
    launchers = [(number, *started("wait_for_ever", "", short_path / str(int(number)))) for number in codes]
    for number, process, _ in launchers:
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    for number, process, temporary in launchers:
        process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == codes[number]
        assert_nothing_is_left(process, temporary)


def stop_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2 * HANG_SECONDS)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_that_is_stopped_at_its_start_is_named_and_ends_all() -> None:
    with pytest.raises(RankError, match=r"^rank 1: its process is stopped \(SIGSTOP\), seen for \d+ s$"):
        launch(stop_rank_1, 2, timeout_seconds=HANG_SECONDS)


def test_time_in_which_the_launcher_did_not_look_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(2 * HANG_SECONDS)
        os._exit(0)
    clock = [time.monotonic()]
    monkeypatch.setattr("runtime.distributed.launch.time.monotonic", lambda: clock[0])

    def look(after: float) -> list[int]:
        clock[0] += after
        return list(watched.look({3: child}))

    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        watched = Standstill()
        assert look(1000.0) == []
        assert look(1000.0) == []
        assert [look(1.0) for _ in range(int(STANDSTILL_SECONDS))][-1] == [3]
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, os.WCONTINUED)
        assert look(1.0) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def refused(label: str) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_without_memfd_results_and_places_go_over_files_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a seccomp profile."""
    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    outbox = Outbox()
    outbox.write(pickle.dumps(Outcome(0, result=5)))
    read: Any = outbox.read()
    assert read.result == 5
    outbox.close()
    page = Page()
    page.write("step 3")
    seen = Page.of(os.getpid(), page.descriptor)
    assert seen is not None
    assert seen.read() == "step 3"
    assert own_page() is not None
