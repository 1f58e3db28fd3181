"""What a forward computes with beside its parameters: theirs by another way, constants, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import PlanError, plan
from planner.capture.export import capture
from planner.capture.model.exchange import swap
from tests.models.one_body import SPEC, Body, OneBody, batch

INPUTS = batch()


def model_of(body: Body) -> Any:
    return OneBody(body).float()


def readers(model: nn.Module, fqn: str) -> list[str]:
    """The ops that read a parameter in the captured graph."""
    program = capture(model, INPUTS)
    (name,) = [n for n, f in program.parameters.items() if f == fqn]
    return [getattr(user.target, "_opname", str(user.target)) for user in program.node(name).users]


def test_a_view_made_before_is_a_view_of_the_parameter() -> None:
    model = model_of(lambda m, x: x @ m.seen)
    model.seen = model.up.weight.t()
    assert readers(model, "up.weight") == ["permute"]


def test_a_detached_view_is_detached_in_the_graph() -> None:
    model = model_of(lambda m, x: m.up(F.pad(x @ m.seen, (0, 4))))
    model.seen = model.up.weight.detach()[2:6].t()
    assert sorted(readers(model, "up.weight")) == ["detach", "linear"]


def test_a_piece_in_any_order_of_memory_is_a_view_of_the_parameter() -> None:
    model = model_of(lambda m, x: x + m.seen)
    model.seen = model.up.weight.as_strided((8,), (9,))
    assert readers(model, "up.weight") == ["diagonal"]


def test_memory_beyond_the_parameter_is_refused() -> None:
    model, memory = model_of(lambda m, x: x + m.seen), torch.randn(8, 16)
    model.up.weight = nn.Parameter(memory[:, :8])
    model.seen = memory[0, 8:]
    with pytest.raises(PlanError, match=r"sees the memory of up\.weight"):
        capture(model, INPUTS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hidden", [lambda: [nn.Linear(8, 8)], lambda: torch.ones(8, requires_grad=True)])
def test_what_no_optimizer_would_train_is_refused_with_its_line(hidden: Callable[[], Any]) -> None:
    held = hidden()
    model = model_of(lambda m, x: held[0](x) if isinstance(held, list) else x * held)
    with pytest.raises(PlanError, match="not a parameter of the model") as error:
        capture(model, INPUTS)
    assert "test_held_tensors.py" in str(error.value)


def test_a_plain_attribute_keeps_its_values_and_its_dtype() -> None:
    model = model_of(lambda m, x: x + m.table.to(x.device, x.dtype))
    model.table = torch.arange(8, dtype=torch.float64)
    program = capture(model, INPUTS, dtype=torch.bfloat16)
    (constant,) = program.constants.values()
    torch.testing.assert_close(constant, torch.arange(8, dtype=torch.float64))


def test_two_parameters_on_one_memory_are_refused() -> None:
    model = model_of(lambda m, x: m.up(x))
    model.embed.weight.data = model.head.weight.data
    with pytest.raises(PlanError, match=r"embed\.weight and head\.weight are separate parameters that share memory"):
        capture(model, INPUTS)


def test_the_model_is_as_it_was_also_after_a_failure() -> None:
    model = model_of(lambda m, x: x[x.sum(-1) > 0])
    weight, values = model.up.weight, model.up.weight.detach().clone()
    with pytest.raises(PlanError):
        capture(model, INPUTS)
    assert model.up.weight is weight
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight.detach(), values, rtol=0, atol=0)
    assert not model._forward_hooks


def test_swapped_tensors_are_each_other_and_back() -> None:
    a, b = nn.Parameter(torch.ones(3)), torch.zeros(2)
    swap(a, b)
    assert type(b) is nn.Parameter
    assert a.shape == (2,)
    swap(a, b)
    assert type(a) is nn.Parameter
    assert a.shape == (3,)


def test_planning_touches_no_gradient_and_no_hook_of_the_model() -> None:
    model = model_of(lambda m, x: m.up(x))
    model(**INPUTS).backward()
    before = {n: p.grad for n, p in model.named_parameters()}
    capture(model, INPUTS)
    assert all(p.grad is before[n] for n, p in model.named_parameters())


def test_parameters_without_a_gradient_are_a_warning() -> None:
    model = model_of(lambda m, x: x)
    made = plan(model, SPEC)
    (told,) = [row.what for row in made.diagnostics if row.level == "warning"]
    assert "up.weight, up.bias" in told
