"""combine(): the names of its models, its frozen ones, and its errors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import combine
from tests.models.preferences import dpo_loss, gpt


def both() -> Any:
    return combine(loss=dpo_loss, frozen=["reference"], policy=gpt(), reference=gpt())


def test_parameters_stand_under_the_names_of_the_models() -> None:
    names = {name for name, _ in gpt().named_parameters()}
    assert {n for n, _ in both().named_parameters()} == {f"{m}.{n}" for m in ("policy", "reference") for n in names}


def test_a_frozen_model_asks_for_no_gradients_and_stays_in_eval() -> None:
    made = both()
    assert {name.partition(".")[0] for name, p in made.named_parameters() if p.requires_grad} == {"policy"}
    for mode in (True, False, True):
        made.train(mode)
        assert (made.policy.training, made.reference.training) == (mode, False)


def test_the_call_of_a_frozen_model_records_no_gradients_even_of_inputs_that_have_them() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def loss(a: Any, b: Any, batch: dict[str, Tensor]) -> Tensor:
        inner = a(batch["x"])
        assert not b(inner).requires_grad
        assert b.scale is made.b.scale
        return inner.sum()

    made = combine(loss=loss, frozen=["b"], a=Given(), b=Given())
    assert made(x=torch.ones(2)).requires_grad


def three(policy: Any, reference: Any, teacher: Any, batch: Any) -> Any:
    return policy


SHARED = gpt()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "arguments": ({"loss": three, "policy": gpt(), "reference": gpt()}, "not (policy, reference, batch)"),
    "no module": (
        {"loss": dpo_loss, "policy": 3, "reference": gpt()},
        "the model policy is a int, not a torch.nn.Module",
    ),
    "no models": ({"loss": dpo_loss}, "combine() got no models"),
    "frozen": (
        {"loss": dpo_loss, "frozen": ["ref"], "policy": gpt(), "reference": gpt()},
        "frozen names no model: ref",
    ),
    "a string": ({"loss": dpo_loss, "frozen": "policy", "policy": gpt(), "reference": gpt()}, "frozen names no model"),
    "shared": (
        {"loss": dpo_loss, "frozen": ["reference"], "policy": SHARED, "reference": copy.copy(SHARED)},
        "policy would be frozen too: it shares parameters with reference",
    ),
    "a method": ({"loss": dpo_loss, "train": gpt()}, "no model can have the name train"),
    "batch": ({"loss": dpo_loss, "batch": gpt()}, "no model can have the name batch"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_error(name: str) -> None:
    arguments, what = BAD[name]
    with pytest.raises(PlanError) as error:
        combine(**arguments)
    assert what in error.value.what
    assert error.value.where
    assert error.value.fix
