"""Modules and functions of torch.jit: captured as their graph runs, with their weights as the model's parameters."""

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from planner import capture, plan
from tests.models import one_body
from tests.models.one_body import BATCH, LENGTH, WIDTH, OneBody, assert_capture_equals


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if x.size(1) > 4 else 1):
            x = x + self.b(F.gelu(self.a(x))) * self.shift
        return x


class Branching(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if bool(x.sum() > 0) else x


def scripted() -> nn.Module:
    return torch.jit.script(Inner())


def traced() -> nn.Module:
    return torch.jit.trace(Inner(), torch.zeros(BATCH, LENGTH, WIDTH).double())


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(scripted(), file)
    file.seek(0)
    return torch.jit.load(file)


class WithInner(OneBody):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(lambda model, x: model.get_submodule("inner")(x))
        self.inner = make()


@torch.jit.script
def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


shifted = torch.jit.trace(lambda x: x * torch.sigmoid(x) + 1, torch.zeros(2).double())
SPEC = {**one_body.SPEC, "mesh": {"tp": 2}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [scripted, traced])
def test_a_module_of_jit_is_captured_with_its_weights(make: Callable[[], nn.Module]) -> None:
    model = WithInner(make)
    assert_capture_equals(model)
    captured = capture(model, SPEC)
    planned = plan(captured, SPEC)
    assert any("inner.a.weight" in str(row) for row in planned.parameters)
    assert type(model.get_parameter("inner.a.weight").detach()) is Tensor


@pytest.mark.parametrize("function", [gated, shifted])
def test_a_function_of_jit_is_captured(function: Callable[[Tensor], Tensor]) -> None:
    assert_capture_equals(OneBody(lambda model, x: function(model.up(x))))


def test_a_script_that_branches_on_data_is_refused_with_a_line() -> None:
    with pytest.raises(PlanError, match="data-dependent") as caught:
        plan(WithInner(lambda: torch.jit.script(Branching())), SPEC)
    assert "test_scripted.py" in str(caught.value)


def test_a_module_that_was_loaded_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"inner\.a\.weight is no nn\.Parameter"):
        plan(WithInner(loaded), SPEC)
