"""A Function is tried once for a model, also where the forward is called again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.program.ops.own_backward import Facts
from planner.capture.export import capture
from planner.capture.gradients import custom_functions
from planner.capture.gradients.applications import Application


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=1e-6))


class Remembers(nn.Module):
    """Leaves its last state behind and reads none of an earlier call: recorded twice, to see that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = Bounded.apply(self.linear(x).exp())
        self.state = y.detach()
        return y.square().mean()


def test_recorded_calls_take_over_what_the_export_has_tried(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    exports: list[object] = []
    facts_of, export = custom_functions.facts_of, torch.export.export

    def counted(use: Application) -> Facts:
        tried.append(use.name)
        return facts_of(use)

    def exported(model: nn.Module, *args: object, **kwargs: object) -> object:
        exports.append(model)
        return export(model, *args, **kwargs)  # pyright: ignore

    monkeypatch.setattr(custom_functions, "facts_of", counted)
    monkeypatch.setattr(torch.export, "export", exported)
    capture(Remembers(), {"x": torch.ones(2, 4)})
    assert len(exports) == 1
    assert len(tried) == 1
