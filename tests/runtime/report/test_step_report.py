"""What a plan warns of is said once where the Engine is made, and only on rank 0."""

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import plan
from runtime import Engine
from runtime.report.log import Planned, Seen, StepRow, make_row
from runtime.report.progress import format_row
from runtime.report.step_report import Contents, PlanWarning, StepClock, StepReport, warn_of

SPEC = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"x": {"shape": [3, 4], "dtype": "float32"}},
    "optimizer": {"name": "adamw"},
}


class Layers(nn.Module):
    """Two layers; ``centered`` ones look at the whole batch."""

    def __init__(self, centered: bool) -> None:
        super().__init__()
        self.layers, self.centered = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), centered

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x - x.mean(0) if self.centered else x).tanh()
        return x.pow(2).mean()


def warned(centered: bool) -> list[warnings.WarningMessage]:
    decided = plan(Layers(centered), SPEC)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Engine(decided) as engine:
            engine.train_step({"x": torch.zeros(4, 3, 4)})
    return [w for w in caught if w.category is PlanWarning]


def test_an_engine_tells_what_its_plan_warns_of_at_the_line_that_makes_it():
    (told,) = warned(centered=True)
    assert "aten.mean.dim mixes the sequences of a batch" in str(told.message)
    assert "test_step_report.py" in str(told.message)
    assert told.filename == __file__


def test_a_plan_without_warnings_is_silent():
    assert warned(centered=False) == []


def test_other_ranks_are_silent():
    decided = plan(Layers(centered=True), SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of(decided, rank=1)


def test_the_figures_of_a_step_are_read_when_asked_for_and_travel_read():
    figures = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    clock = StepClock(torch.device("cpu"))
    clock.num_tokens = 100
    clock.stop()
    report = StepReport(figures, 0.1, clock)
    figures[2] = 0.25  # the device is not done when the report is made
    assert (report.loss, report.grad_norm, report.skipped, report.lr) == (0.25, 2.0, True, 0.1)
    there = pickle.loads(pickle.dumps(report))
    assert str(there) == str(report)
    assert there.tokens_per_s == report.tokens_per_s > 0


def test_a_step_without_a_batch_tells_no_speed():
    assert StepReport(torch.zeros(3), 0.1).tokens_per_s == 0.0


def test_the_tokens_of_each_expert_by_layer_and_how_uneven_they_are():
    figures = torch.tensor([2.0, 0.0, 0.5, 4, 4, 4, 4, 6, 0, 1, 1, 0, 0], dtype=torch.float64)
    report = StepReport(figures, 0.1, contents=Contents([("blocks.0", 4), ("blocks.1", 4), ("blocks.1", 2)]))
    assert report.expert_tokens == {"blocks.0": [4] * 4, "blocks.1": [6, 0, 1, 1], "blocks.1 #2": [0, 0]}
    assert report.imbalance == 3.0
    assert pickle.loads(pickle.dumps(report)).expert_tokens == report.expert_tokens
    assert (report.dropped_share, report.drops) == (0.0, False)
    alone = StepReport(figures[:3], 0.1)
    assert (alone.expert_tokens, alone.imbalance, alone.dropped_share) == ({}, 1.0, None)


@pytest.mark.parametrize(("drops", "share"), [(True, 0.125), (None, None)])
def test_the_share_of_choices_that_found_no_slot(drops, share):
    figures = torch.tensor([2.0, 0.0, 0.5, 4, 4, 6, 2, 2, 0], dtype=torch.float64)
    report = StepReport(figures, 0.1, contents=Contents([("blocks.0", 2), ("blocks.1", 2)], dropping=1, drops=drops))
    assert (report.dropped_share, report.stop_requested) == (share, False)
    assert pickle.loads(pickle.dumps(report)).dropped_share == share
    row = StepRow(1, 0.5, 2.0, 0.1, 9.0, imbalance=1.5, dropped=share)
    assert format_row(row).endswith("experts 1.50×  dropped 12.5 %" if share else "experts 1.50×")


def test_a_row_sets_what_a_step_did_beside_the_plan():
    told = [0.0, 7.0, 7.0, 0.0, 0.0, 3.0, 2.0, 4.0, 3.5, 2.0**30, 2.0**31]  # of two ranks, of one pipeline
    figures = torch.tensor([2.0, 0.0, 0.5, *told], dtype=torch.float64)
    clock = StepClock(torch.device("cpu"))
    clock.num_tokens = 100
    clock.stop()
    scale = torch.tensor(1024.0)
    contents = Contents(num_notes=len(told), places=[(0, 0), (1, 0)], pipelines=[0, 0])
    report = StepReport(figures, 0.1, clock, contents, scale=scale)
    seen = Seen(7, data_seconds=report.seconds)
    row = make_row(report, Planned(flops=6e9, peak=1e12, bubble=0.25), seen, seconds_left=3.0)
    assert (row.step, row.loss, row.loss_scale, row.seconds_left) == (7, 0.5, 1024.0, 3.0)
    assert row.bubble == pytest.approx(1 - (3 / 4 + 2 / 4) / 2)
    assert (row.planned_bubble, row.memory_bytes, row.data_share) == (0.25, 1 << 31, 0.5)
    assert row.flops_per_s == pytest.approx(6e9 / report.seconds)
    assert row.peak_share == pytest.approx(6e9 / report.seconds / 1e12)
    bare = make_row(StepReport(figures[:3], 0.1, clock), Planned(0.0, 0.0, 0.25), Seen(7))
    absent = ("bubble", "planned_bubble", "memory_bytes", "flops_per_s", "peak_share", "loss_scale", "seconds_left")
    assert [getattr(bare, name) for name in absent] == [None] * len(absent)
    assert pickle.loads(pickle.dumps(report)).bubble == report.bubble


EMPTY = torch.empty


class _OnADevice(Tensor):
    """A tensor of the CPU that says it is one of CUDA."""

    is_cuda = True  # pyright: ignore[reportAssignmentType]


class _Queue:
    """In place of torch.cuda: what is queued runs when the host waits for an event behind it."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.waited_for: list[int] = []

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(place=None)

        def record() -> None:
            event.place = len(self.queued)

        def synchronize() -> None:
            self.waited_for.append(event.place)
            while self.queued and event.place > 0:
                self.queued.pop(0)()
                event.place -= 1

        event.record, event.synchronize = record, synchronize
        return event


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> _Queue:
    made, copy = _Queue(), Tensor.copy_

    def queued_copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        made.queued.append(lambda: copy(to, source.as_subclass(Tensor)))
        return to

    monkeypatch.setattr(torch.cuda, "Event", made.Event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **kwargs: EMPTY(*shape, **kwargs).fill_(-1))
    monkeypatch.setattr(Tensor, "copy_", queued_copy)
    return made


def test_figures_of_a_step_are_those_of_its_place_in_the_queue(queue: _Queue):
    figures = torch.tensor([2.0, 0.0, 0.5]).as_subclass(_OnADevice)
    scale = torch.tensor(1024.0).as_subclass(_OnADevice)
    report = StepReport(figures, 0.1, scale=scale)
    later: list[str] = []
    queue.queued.append(lambda: later.append("the next step"))
    assert queue.waited_for == []
    assert (report.loss, report.grad_norm, report.skipped) == (0.5, 2.0, False)
    assert queue.waited_for == [1]
    assert later == []


@pytest.mark.gpu
def test_on_a_gpu_a_later_change_of_the_tensor_is_not_read():
    figures = torch.tensor([2.0, 0.0, 0.5], device="cuda")
    report = StepReport(figures, 0.1)
    figures.zero_()
    assert (report.loss, report.grad_norm) == (0.5, 2.0)
