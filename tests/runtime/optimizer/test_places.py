"""Products add their weights' gradients into the buffers, at once or in a W; a W that is wrong is caught."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.ops.linear import linear
from passes.ops.weight_gradients import WeightGradients
from runtime.optimizer.buffers import GradientBuffers
from tests.runtime.optimizer.test_zero1 import entries
from tests.tools import zero1_ranks as ranks

MICROBATCHES = 3


class Stage:
    """Two products and a norm behind each other, their buffers, and what one backward after another would give."""

    def __init__(self, dtype: torch.dtype = torch.float64, *precision: str) -> None:
        torch.manual_seed(0)
        self.parameters = {
            "first": nn.Parameter(torch.randn(5, 4, dtype=dtype)),
            "bias": nn.Parameter(torch.randn(5, dtype=dtype)),
            "scale": nn.Parameter(torch.randn(5, dtype=dtype)),
            "second": nn.Parameter(torch.randn(5, 3, dtype=dtype)),
        }
        self.inputs = [torch.randn(6, 4, dtype=dtype, requires_grad=True) for _ in range(MICROBATCHES)]
        self.expected = self._expected()
        optimizer = ranks.optimizer_of(entries(**self.parameters), ranks.settings(), *precision)
        self.buffers: GradientBuffers = optimizer.buffers
        self.handle = WeightGradients()
        self.handle.bind(self.buffers)

    def forward(self, x: Tensor, handle: WeightGradients | None) -> Tensor:
        p = self.parameters
        hidden = linear(x, p["first"], p["bias"], False, handle) * p["scale"]
        return linear(hidden.tanh(), p["second"], None, True, handle).sin().sum()

    def _expected(self) -> dict[str, Tensor]:
        for x in self.inputs:
            self.forward(x, None).backward()
        found = {name: p.grad.float() if p.dtype == torch.bfloat16 else p.grad for name, p in self.parameters.items()}
        for p in (*self.parameters.values(), *self.inputs):
            p.grad = None
        return found  # pyright: ignore

    def backward(self, microbatch: int, *, waits: bool, is_last: bool) -> None:
        self.buffers.last_microbatch = is_last
        with self.handle.put_aside((0, microbatch) if waits else None):
            self.forward(self.inputs[microbatch], self.handle).backward()

    def weights(self, microbatch: int, *, is_last: bool) -> None:
        self.buffers.last_microbatch = is_last
        self.handle.run((0, microbatch))

    def differs(self, limit: float = 1e-12) -> list[str]:
        self.buffers.finish_grad_sync()
        close = {
            name: torch.allclose(p.main_grad, self.expected[name], rtol=limit, atol=limit)  # pyright: ignore
            for name, p in self.parameters.items()
        }
        return [name for name, is_close in close.items() if not is_close]


def test_products_of_all_microbatches_add_up_without_a_gradient_in_between():
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=False, is_last=microbatch == MICROBATCHES - 1)
        assert all(p.grad is None for p in stage.parameters.values())
    assert stage.buffers.launches == [(0, 0)]
    assert stage.differs() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_bucket_is_sent_when_the_last_w_has_its_last_gradient(order):
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
    for microbatch in order:
        assert stage.buffers.launches == []
        stage.weights(microbatch, is_last=microbatch == order[-1])
    assert stage.buffers.launches == [(0, 0)]
    assert stage.handle.num_waiting == 0
    assert stage.differs() == []


def test_the_next_step_starts_afresh():
    stage = Stage()
    for _ in range(2):
        for microbatch in range(MICROBATCHES):
            stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
            stage.weights(microbatch, is_last=microbatch == MICROBATCHES - 1)
        assert stage.differs() == []


def test_a_w_that_is_left_out_is_still_waiting_and_shows_in_the_numbers():
    stage = Stage()
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=True, is_last=microbatch == MICROBATCHES - 1)
    for microbatch in (0, 2):
        stage.weights(microbatch, is_last=microbatch == 2)
    assert stage.handle.num_waiting == 1
    assert set(stage.differs()) == {"first", "bias", "second"}


def test_a_w_that_runs_twice_is_refused():
    stage = Stage()
    stage.backward(0, waits=True, is_last=False)
    stage.weights(0, is_last=False)
    with pytest.raises(AssertionError, match=r"\(0, 0\), or it has run"):
        stage.weights(0, is_last=False)


def test_a_w_after_its_bucket_was_sent_is_refused():
    stage = Stage()
    for microbatch in range(2):
        stage.backward(microbatch, waits=True, is_last=microbatch == 1)
    stage.weights(0, is_last=True)
    assert stage.buffers.launches == [(0, 0)]
    with pytest.raises(AssertionError, match="came after the reduction of its bucket"):
        stage.weights(1, is_last=False)


def test_a_weight_that_is_looked_up_too_waits_for_all_contributions():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    buffers = ranks.optimizer_of(entries(weight=weight), ranks.settings()).buffers
    buffers.expect({id(weight): 2})
    handle = WeightGradients()
    handle.bind(buffers)
    ids = torch.tensor([1, 2, 2])
    torch.nn.functional.linear(torch.nn.functional.embedding(ids, weight), weight).sin().sum().backward()
    buffers.begin_step()
    expected = weight.main_grad.clone()
    buffers.last_microbatch = True
    with handle.put_aside((0, 0)):
        linear(torch.nn.functional.embedding(ids, weight), weight, None, False, handle).sin().sum().backward()
    assert buffers.launches == []
    handle.run((0, 0))
    assert buffers.launches == [(0, 0)]
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-12, atol=1e-12)


def test_while_nobody_listens_gradients_stay_where_autograd_puts_them():
    stage = Stage()
    with stage.buffers.deaf():
        stage.forward(stage.inputs[0], stage.handle).backward()
    assert all(p.grad is not None for p in stage.parameters.values())
    assert all(slot.is_fresh for slot in stage.buffers.slots)


def test_products_of_half_precision_are_summed_in_float32():
    stage = Stage(torch.bfloat16, "float32")
    for microbatch in range(MICROBATCHES):
        stage.backward(microbatch, waits=False, is_last=microbatch == MICROBATCHES - 1)
    assert stage.parameters["first"].main_grad.dtype == torch.float32
    assert stage.differs(0.05) == []
