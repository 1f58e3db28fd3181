"""What a rank waits for other stages in a run, and what the bubble of all of them is."""

from __future__ import annotations

import pytest
import torch

from planner.pipeline.links import Message
from runtime.distributed.marks import Marks
from runtime.distributed.messages import Told
from runtime.pipeline.p2p import Waits
from runtime.report.step_report import bubble_of

MESSAGE = Message("F", 0, 0)


class Clock(Marks):
    """Marks that are set by hand; ``passed``: how far the device has come."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.time, self.passed = 0.0, 1e9

    def now(self) -> float:
        return self.time

    def is_past(self, mark: float) -> bool:
        return mark <= self.passed


def run(waits: Waits, clock: Clock, *waited: tuple[float, float], seconds: float = 10.0) -> None:
    """A run of ``seconds``, with waits from … to, counted from its begin."""
    begun = clock.time
    waits.begin()
    for start, end in waited:
        clock.time = begun + start
        mark = waits.now()
        clock.time = begun + end
        waits.note(MESSAGE, mark)
    clock.time = begun + seconds
    waits.end()


def test_a_rank_works_when_it_does_not_wait():
    clock = Clock()
    waits = Waits(clock)
    run(waits, clock, (0.0, 3.0), (5.0, 6.5))
    assert waits.newest() == (5.5, 10.0)
    assert waits.newest() == (0.0, 0.0)  # told, and no run since
    assert [(wait.start, wait.end) for wait in waits.latest] == [(0.0, 3.0), (5.0, 6.5)]


def test_of_a_device_that_is_behind_the_newest_finished_run_is_told():
    clock = Clock()
    waits = Waits(clock)
    clock.passed = -1.0
    run(waits, clock, (0.0, 3.0))
    assert waits.newest() == (0.0, 0.0)
    run(waits, clock, (0.0, 2.0))
    clock.passed = 10.0
    assert waits.newest() == (7.0, 10.0)
    run(waits, clock, seconds=4.0)
    clock.passed = 24.0
    assert waits.newest() == (4.0, 4.0)


def test_outside_of_a_run_and_for_a_rank_alone_nothing_is_noted():
    clock = Clock()
    waits = Waits(clock)
    assert waits.now() is None
    waits.note(MESSAGE, None)
    waits.end()
    alone = Waits(clock, is_alone=True)
    run(alone, clock, (0.0, 1.0))
    assert (waits.latest, waits.newest(), alone.latest, alone.newest()) == ([], (0.0, 0.0), [], (0.0, 0.0))


def test_the_usual_seconds_are_the_median_of_the_last_runs_once_there_are_enough():
    clock = Clock()
    waits = Waits(clock, num_ranks=1)
    for seconds in (30.0, 4.0, 5.0, 6.0):
        run(waits, clock, seconds=seconds)
        clock.passed = clock.time
        assert waits.usual() == 0.0
    run(waits, clock, (0.0, 1.0), seconds=4.0)
    clock.passed = clock.time
    assert waits.usual() == 5.0
    assert waits.newest() == (0.0, 0.0)  # one rank has no bubble


def test_the_bubble_is_the_mean_share_of_the_first_stages_run_in_which_ranks_do_not_work():
    told = Told(working_seconds=(8.0, 6.0, 9.0, 3.0), pipeline_seconds=(10.0, 9.0, 12.0, 99.0))
    assert bubble_of(told, [0, 0, 2, 2]) == pytest.approx(1 - (0.8 + 0.6 + 0.75 + 0.25) / 4)
    unknown = Told(working_seconds=(8.0, 0.0), pipeline_seconds=(10.0, 0.0))
    assert bubble_of(unknown, [0, 0]) is None
    assert bubble_of(Told(), []) is None


@pytest.mark.gpu
def test_on_a_gpu_marks_are_events_that_nobody_waits_for():
    marks = Marks(torch.device("cuda"))
    waits = Waits(marks)
    busy = torch.randn(4096, 4096, device="cuda")
    waits.begin()
    start = waits.now()
    for _ in range(50):
        busy = (busy @ busy).tanh()
    waits.note(MESSAGE, start)
    waits.end()
    torch.cuda.synchronize()
    worked, run = waits.newest()
    assert 0 <= worked < run
    assert marks.seconds(waits.latest[0].start, waits.latest[0].end) == pytest.approx(run - worked)
