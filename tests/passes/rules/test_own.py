"""Rules of a user's own ops: read, counted, tried on an example; each mistake is one error at the line of the rule."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import planner
from passes.rules.flops import node_flops
from passes.rules.own import OWN, own_rule
from passes.rules.rule import Role
from passes.rules.table import rule_of
from planner import PlanError
from tests.tools.captures import program_again
from tests.tools.own_ops import LENGTH, build

pytestmark = pytest.mark.check


@torch.library.custom_op("meshwright_tests::rotated", mutates_args=())
def rotated(x: Tensor, weight: Tensor, turns: int) -> Tensor:
    """A product with rows that are rolled: a row depends on its neighbours."""
    return torch.roll(x, turns, 0) @ weight


@torch.library.custom_op("meshwright_tests::half_backward", mutates_args=())
def half_backward(x: Tensor) -> Tensor:
    return x * 1.0


@torch.library.custom_op("meshwright_tests::sine_of_small", mutates_args=())
def sine_of_small(x: Tensor) -> Tensor:
    """By elements while all values are small."""
    return x.sin() if x.abs().max() < 30 else x - x.sum()


sine_of_small.register_fake(torch.empty_like)
rotated.register_fake(lambda x, weight, turns: x.new_empty(x.shape[0], weight.shape[1]))
half_backward.register_fake(torch.empty_like)
half_backward.register_autograd(lambda ctx, grad: grad * torch.arange(grad.shape[0], dtype=grad.dtype).unsqueeze(1))
X, W = torch.randn(4, 6), torch.randn(6, 8)
ROTATED = "meshwright_tests::rotated"


@pytest.fixture(autouse=True)
def _rules_are_put_back() -> Iterator[None]:
    before = dict(OWN)
    yield
    OWN.clear()
    OWN.update(before)


def test_a_captured_call_has_the_factors_and_the_flops_of_its_rule() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    graph = program_again(build(), {"ids": ids, "labels": ids}).graph.graph
    (call, _) = [n for n in graph.nodes if "gelu_linear" in str(n.target)]
    rule = rule_of(call)
    assert rule is not None
    assert [(f.role, f.size) for f in rule.factors if f.role is Role.MIX] == [(Role.MIX, 16)]
    assert node_flops(call) == 2 * (2 * LENGTH) * 16 * 64


@pytest.mark.parametrize(
    ("op", "text", "options", "what"),
    [
        (ROTATED, "a b, b c => a c", {}, "has not one"),
        (ROTATED, "a b, b c -> a c", {}, '"b" is not in the result'),
        ("meshwright_tests::nothing", "a -> a", {}, "no op meshwright_tests::nothing is registered"),
        (f"{ROTATED}.other", "a b, b c -> a c", {}, "has no overload other"),
        (ROTATED, "a b+ -> a", {}, "has 1 operands, and the op has 2 tensors (x, weight)"),
        (ROTATED, "a b, b c, c -> a c", {}, "is not in the result"),
        (ROTATED, "a^ b+, b+ c -> a^ c", {}, "could not be tried: the op fails on an example"),
        (ROTATED, "a^ b+, b+ c -> a^ c d", {"example": (X, W, 1)}, "does not fit the example [4, 6], [6, 8] -> [4, 8]"),
        (ROTATED, "a b+, b+ c -> a c", {"example": (X, W, 1)}, "is not true of an example"),
        ("meshwright_tests::sine_of_small", "a b -> a b", {}, "is not true of an example"),
        (ROTATED, "a^ b+, b+ c^ -> a^ c^", {"example": (X, W, "one")}, "the op fails on an example"),
        ("meshwright_tests::half_backward", "a b -> a b", {}, "gradient of 0"),
    ],
)
def test_a_mistake_is_one_error_at_the_line_of_the_rule(op: str, text: str, options: Any, what: str) -> None:
    with pytest.raises(PlanError) as error:
        planner.rule(op, text, **options)
    assert what in str(error.value).replace("\n", " ")
    assert "test_own.py" in str(error.value.where)
    assert error.value.fix


def test_a_right_rule_is_taken_and_the_latest_holds() -> None:
    planner.rule(ROTATED, "a^ b^, b^ c -> a^ c", example=(X, W, 1))
    planner.rule(ROTATED, "a^ b+, b+ c -> a^ c", example=(X, W, 1))
    own = own_rule(torch.ops.meshwright_tests.rotated.default)
    assert own is not None
    assert own.text == "a^ b+, b+ c -> a^ c"
    assert own.flops is not None
    assert own.flops({"a": 4, "b": 6, "c": 8}) == 2 * 4 * 6 * 8
