"""Reading a step's figures waits for the copy that stands behind that step in the queue, not for later work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.report.step_report import StepReport

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
