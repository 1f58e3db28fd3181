"""A cache that a forward fills in Python: kept where it holds what each call would compute, refused otherwise."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import PlanError, plan
from tests.models.one_body import SPEC
from tests.models.with_state import Middle, Model


def cached_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] <= m.calls:
        return x * m.table[: x.shape[1]].detach()
    table = torch.outer(torch.arange(x.shape[1]).float(), m.rates)
    m.table[: x.shape[1]] = table
    m.calls = x.shape[1]
    return x * table


def cached_wrongly(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] <= m.calls:
        return x * m.table[: x.shape[1]].detach() * 2
    return cached_in_a_buffer(m, x)


def cached_in_an_attribute(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] > m.calls:
        m.calls, m.memory = x.shape[1], torch.outer(torch.arange(x.shape[1]).float(), m.average + 1).cos()
    return x * m.memory[: x.shape[1]]


def with_table(middle: Middle) -> Model:
    model = Model(middle)
    model.register_buffer("table", torch.zeros(16, 8), persistent=False)
    model.register_buffer("unread", torch.eye(3).to_sparse(), persistent=False)
    model.rates = nn.Parameter(torch.linspace(1.0, 2.0, 8), requires_grad=False)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("middle", [cached_in_a_buffer, cached_in_an_attribute], ids=lambda f: f.__name__)
def test_a_cache_that_holds_what_would_be_computed_is_no_dependence(middle: Middle) -> None:
    assert plan(with_table(middle), SPEC).parameters


def test_a_cache_that_holds_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match="Python state of earlier calls"):
        plan(with_table(cached_wrongly), SPEC)


class Scaled(nn.Module):
    """By the mean of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.mean()
        return x * self.scale


def test_a_buffer_that_the_first_batch_fills_is_refused() -> None:
    model = Model(lambda m, x: m.scaled(x))
    model.scaled = Scaled()
    with pytest.raises(PlanError, match=r"depends on Python state of earlier calls \(scaled.scale\)") as caught:
        plan(model, SPEC)
    assert "self.scale" in str(caught.value.where)
    assert model.scaled.scale is None


@pytest.mark.parametrize("factor", [1, 2])
def test_a_first_call_that_divides_a_weight_is_refused_unless_it_divides_by_one(factor: int) -> None:
    def rescaled(m: Any, x: Tensor) -> Tensor:
        if not m.ready:
            with torch.no_grad():
                m.up.weight.div_(factor)
            m.ready = True
        return F.linear(x, m.up.weight)

    model = Model(rescaled)
    if factor == 1:
        assert not [row for row in plan(model, SPEC).diagnostics if "earlier" in row.what]
    else:
        with pytest.raises(PlanError, match=r"up\.weight|\(ready\)"):
            plan(model, SPEC)
    assert not model.ready


def test_a_buffer_that_a_forward_registers_is_gone_again() -> None:
    def tabled(m: Any, x: Tensor) -> Tensor:
        if m.table is None:
            m.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        return x * m.table

    model = Model(tabled)
    model.register_buffer("table", None, persistent=False)
    assert plan(model, SPEC).parameters
    assert model.table is None
