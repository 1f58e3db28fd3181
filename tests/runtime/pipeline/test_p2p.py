"""Messages between stages: order, layout in memory, receives that are posted ahead, sends that nothing waits for."""

import pytest
import torch

from passes.ops.random_state import RandomState
from planner.mesh import Mesh
from planner.pipeline.links import Message
from planner.pipeline.schedule import build_schedule
from runtime.distributed.groups import Groups
from runtime.distributed.launch import launch
from runtime.distributed.marks import Marks
from runtime.distributed.messages import Told
from runtime.distributed.opening import open_groups
from runtime.pipeline.executor import Executor, Step
from runtime.pipeline.p2p import Transport, Waits
from runtime.report.step_report import bubble_of
from tests.tools.handmade_stages import boundary
from tests.tools.limits import HANG_SECONDS
from tests.tools.scale_stages import scale_batches, scale_loss, scale_stages

NUM_MESSAGES = 12

WIDE = boundary("wide", (3, 4), torch.float64)
KIND = boundary("kind", (2,), torch.int64, requires_grad=False)
FLAG = boundary("flag", (2,), torch.bool, requires_grad=False)
ALL = (WIDE, KIND, FLAG)


def values(microbatch: int) -> list[torch.Tensor]:
    wide = torch.arange(12, dtype=torch.float64).view(4, 3).t() + microbatch
    return [wide, torch.tensor([microbatch, -1]), torch.tensor([True, False])]


def exchange() -> list[list]:
    """Two pp ranks: stage 0 sends many microbatches, stage 1 receives them in reverse and sends gradients back."""
    groups = open_groups(Mesh(pp=2), {}, [], timeout_seconds=HANG_SECONDS)
    transport, count = Transport(groups, 2), NUM_MESSAGES
    received = []
    if groups.place["pp"] == 0:
        for microbatch in range(count):
            transport.post(Message("B", 0, microbatch), ALL)
            transport.send(Message("F", 0, microbatch), values(microbatch))
        received = [transport.receive(Message("B", 0, m), ALL)[0].tolist() for m in range(count)]
    else:
        for microbatch in range(count):
            transport.post(Message("F", 0, microbatch), ALL)
        for microbatch in reversed(range(count)):
            arrived = transport.receive(Message("F", 0, microbatch), ALL)
            received.append([t.tolist() for t in arrived])
            transport.send(Message("B", 0, microbatch), [(arrived[0].t().contiguous() * 2).t()])
    transport.drain()
    groups.close()
    return received


@pytest.mark.slow
def test_tensors_of_every_kind_cross_and_only_those_with_gradients_come_back():
    gradients, arrived = launch(exchange, 2, timeout_seconds=HANG_SECONDS)
    count = NUM_MESSAGES
    assert arrived == [[t.tolist() for t in values(m)] for m in reversed(range(count))]
    assert gradients == [(values(m)[0] * 2).tolist() for m in range(count)]


def test_stages_of_one_rank_hand_their_tensors_over():
    transport = Transport(Groups(Mesh(), 0, torch.device("cpu"), None), 2)  # pyright: ignore[reportArgumentType]
    sent = values(0)
    transport.send(Message("F", 0, 0), sent)
    arrived = transport.receive(Message("F", 0, 0), ALL)
    assert all(a.data_ptr() == s.data_ptr() for a, s in zip(arrived, sent, strict=True))
    transport.drain()


NUM_ELEMENTS = 1 << 15  # 128 KiB a message, more than a socket takes without a reader
SCHEDULES: dict[int, list[tuple[str, int, int, int | None]]] = {  # pp: (kind, microbatches, vpp, group size)
    2: [
        ("gpipe", 12, 1, None),
        ("1f1b", 12, 1, None),
        ("interleaved_1f1b", 16, 2, 2),
        ("interleaved_1f1b", 16, 2, 16),  # stuck where a fifth send waited for the first
        ("interleaved_1f1b", 15, 3, 9),
        ("interleaved_1f1b", 24, 3, 24),
    ],
    4: [("gpipe", 9, 1, None), ("1f1b", 9, 1, None), ("interleaved_1f1b", 24, 2, 12), ("interleaved_1f1b", 20, 3, 20)],
}


def run_schedules(pp: int) -> list[tuple[float, list[float], list[int]]]:
    """Each schedule once: this rank's loss, its stages' gradients, and the most sends that were held at once."""
    found = []
    for kind, microbatches, vpp, group_size in SCHEDULES[pp]:
        schedule = build_schedule(kind, pp, microbatches, vpp, group_size)
        groups = open_groups(Mesh(pp=pp, vpp=vpp, fold=schedule.fold), {}, [], timeout_seconds=HANG_SECONDS)
        stages = scale_stages(groups.place["pp"], schedule, NUM_ELEMENTS)
        held: list[int] = []
        transport = Transport(groups, pp * vpp, schedule.orders)
        executor = Executor(
            stages,
            schedule.orders[groups.place["pp"]],
            transport,
            RandomState(0, 0),
            before_backward=lambda _, transport=transport, held=held: held.append(len(transport._sending)),
        )
        loss = executor.run(Step(0, scale_batches(microbatches, NUM_ELEMENTS), 0, []))
        gradients = [s.module.get_parameter("weight").grad for s in stages]
        found.append((0.0 if loss is None else loss.item(), [g.item() for g in gradients if g is not None], held))
        groups.close()
    return found


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("pp", SCHEDULES)
def test_every_schedule_ends_whatever_the_size_of_its_groups(pp):
    ranks = launch(run_schedules, pp, pp, timeout_seconds=HANG_SECONDS)
    for index, (kind, microbatches, vpp, _) in enumerate(SCHEDULES[pp]):
        total = scale_loss(pp * vpp, microbatches, NUM_ELEMENTS)
        assert sum(rank[index][0] for rank in ranks) == pytest.approx(total, rel=1e-6)
        gradients = [gradient for rank in ranks for gradient in rank[index][1]]
        assert gradients == pytest.approx([total / 2] * (pp * vpp), rel=1e-5)
        if kind == "1f1b":  # a few messages are held, not one for each microbatch
            assert max(max(rank[index][2]) for rank in ranks) <= 2 * pp


@pytest.mark.slow
def test_a_send_is_held_until_a_message_shows_that_it_was_used():
    assert launch(count_held, 2, timeout_seconds=HANG_SECONDS)[0] == [3, 2, 1, 0]


def count_held() -> list[int]:
    """Rank 0's held sends: after three forwards, after the peer's first backward (which used one), second, and last."""
    schedule = build_schedule("1f1b", 2, 3)
    groups = open_groups(Mesh(pp=2), {}, [], timeout_seconds=HANG_SECONDS)
    transport, held = Transport(groups, 2, schedule.orders), []
    for microbatch in range(3):
        if groups.place["pp"] == 0:
            transport.send(Message("F", 0, microbatch), values(microbatch))
    if groups.place["pp"] == 0:
        held.append(len(transport._sending))
    for microbatch in range(3):
        if groups.place["pp"] == 0:
            transport.receive(Message("B", 0, microbatch), ALL)
            held.append(len(transport._sending))
        else:
            transport.receive(Message("F", 0, microbatch), ALL)
            transport.send(Message("B", 0, microbatch), values(microbatch)[:1])
    transport.drain()
    groups.close()
    return held


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
