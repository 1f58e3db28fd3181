"""A Function with a backward of its own is one call: what is shown of it, how it is typed, and what is refused."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd import Function

from passes.blocks.structure import Structure
from passes.errors import PlanError, Where
from passes.partition.typings.base import Form
from passes.partition.typings.table import Option, Site, options_of
from passes.program.ops.own_backward import Cut, OwnBackward
from passes.types.types import I, Placement, R, Segment, V
from planner.capture.export import capture
from planner.capture.gradients.applications import Application
from planner.capture.gradients.custom_functions import CustomFunctions
from tests.models.custom_functions import (
    Clamped,
    FusedLoss,
    Multiplier,
    NoisyRound,
    Quantised,
    Reversed,
    Rounded,
    Sign,
    Ternary,
    UnitGradient,
    calls_in,
)
from tests.models.one_body import OneBody, assert_capture_equals, batch
from tests.tools.commands import python
from tests.tools.random_ops import op_of, real
from tests.tools.simulated_ranks import Op, check

BODIES: dict[str, Any] = {
    "round": lambda m, x: Rounded.apply(m.up(x), 8),
    "sign": lambda m, x: Sign.apply(m.up(x)),
    "reversed": lambda m, x: Reversed.apply(m.up(x), 0.5),
    "clamped": lambda m, x: Clamped.apply(m.up(x)),
    "unit": lambda m, x: UnitGradient.apply(m.up(x)),
    "ternary": lambda m, x: F.linear(x, Ternary.apply(m.up.weight)),
    "two outputs": lambda m, x: sum(Quantised.apply(m.up(x), m.scale)),
    "one of two outputs": lambda m, x: Quantised.apply(m.up(x), m.scale)[0],
    "router": lambda m, x: x * routed(m.up(x)),
    "in a branch without gradients": lambda m, x: x + without_gradients(m.up(x)),
    "an argument of no use": lambda m, x: InAList.apply([x], m.up(x)),
    "values are read": lambda m, x: ByNumbers.apply(m.up(x)),
}


def routed(scores: Tensor) -> Tensor:
    gates, chosen = scores.softmax(-1), scores.argmax(-1, keepdim=True)
    multiplier = gates.gather(-1, chosen)
    return Multiplier.apply(scores, multiplier, chosen, gates, torch.ones_like(multiplier))


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return Rounded.apply(x, 8)


class InAList(Function):
    """Autograd sees no tensor within a list."""

    @staticmethod
    def forward(ctx: Any, others: list[Tensor], x: Tensor) -> Tensor:
        return others[0] + x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class ByNumbers(Function):
    """Runs on values alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().round())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", BODIES)
def test_the_captured_graph_trains_as_the_model(name: str) -> None:
    model = OneBody(BODIES[name])
    calls = list(calls_in(capture(model, batch()).graph.graph))
    assert len(calls) == (name != "in a branch without gradients")
    assert_capture_equals(model)


def call_of(function: Any, *args: Any) -> OwnBackward:
    use = Application.of(function, args, Where())
    call = CustomFunctions().kept_as_call(use, args)
    assert call is not None
    return call


IDS = torch.randint(4, (4, 6, 1))
USES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "round": (Rounded, (real(4, 6, 8), 8)),
    "sign": (Sign, (real(4, 6, 8),)),
    "reversed": (Reversed, (real(4, 6, 8), 2.0)),
    "clamped": (Clamped, (real(4, 6, 8),)),
    "unit": (UnitGradient, (real(4, 6, 8),)),
    "ternary": (Ternary, (real(6, 8),)),
    "quantised": (Quantised, (real(4, 6, 8), real(8).detach().abs().add(0.5).requires_grad_())),
    "router": (Multiplier, (real(4, 6, 4), real(4, 6, 1, grad=False), IDS, real(4, 6, 4, grad=False),
                            real(4, 6, 1, grad=False))),
    "loss": (FusedLoss, (real(4, 6, 8), real(5, 8), torch.randint(5, (4, 6)))),
}  # fmt: skip
LINEAR = {"round", "sign", "reversed", "ternary", "quantised", "router", "loss"}
CUTS = {
    "round": {0, 1, 2}, "sign": {0, 1, 2}, "reversed": {0, 1, 2}, "clamped": {0, 1, 2}, "unit": {0, 1},
    "ternary": set(), "quantised": {0, 1, 2}, "router": {0, 1}, "loss": set(),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", USES)
def test_what_is_shown_of_a_backward(name: str) -> None:
    function, args = USES[name]
    facts = call_of(function, *args).facts
    assert facts.tried
    assert facts.linear == (name in LINEAR)
    assert {cut.dim for cut in facts.cuts} == CUTS[name]


def test_a_gradient_that_never_arrives_and_a_cut_of_one_input_are_known() -> None:
    function, args = USES["router"]
    assert call_of(function, *args).facts.reached == (True, False, False, False, False)
    function, args = USES["quantised"]
    assert call_of(function, *args).facts.cuts == (Cut(0, (0, None)), Cut(1, (1, None)), Cut(2, (2, 0)))
    assert [output.differentiable for output in call_of(function, *args).made] == [True, False]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", USES)
def test_every_admitted_typing_of_an_own_backward_is_right(name: str) -> None:
    function, args = USES[name]
    call = call_of(function, *args)
    op = op_of(call, tuple(a for a in args if isinstance(a, Tensor)), item=0 if len(call.made) > 1 else None)
    found = [pair for cuts in cuts_of(op.inputs) for pair in typings(op, cuts)]
    assert any(option.out.is_sharded for _, option in found) == bool(CUTS[name])
    for source, option in dict.fromkeys(found):
        check(op, option, 2, source=source)


def cuts_of(inputs: list[fx.Node]) -> Iterator[dict[str, set[Placement]]]:
    """One input cut along one dim: evenly, or but for a segment that every rank holds."""
    for node in inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if size % 2 == 0:
                but_two = Placement("V", dim, (Segment(size - 2), Segment(2, False)))
                yield {node.name: {V(dim, size), but_two}}


def typings(op: Op, cuts: dict[str, set[Placement]]) -> Iterator[tuple[Option | None, Option]]:
    """(option of the tuple that the op takes an item of, or None; option of the op)."""
    first = options_of(Site(op.chain[0], 2, cuts))
    if len(op.chain) == 1:
        yield from ((None, option) for option in first)
        return
    of_tuple = {op.chain[0].name: {o.out for o in first if o.out.is_sharded}}
    for option in options_of(Site(op.node, 2, of_tuple)):
        yield from ((source, option) for source in first if source.out == option.args[0])


def test_a_backward_that_is_not_linear_takes_no_partial_sums() -> None:
    x = real(4, 6)
    op = op_of(call_of(Clamped, x), (x,))
    assert [o for o in options_of(Site(op.node, 2, {})) if o.out == R] == []
    check(op, Option((I,), I, Form.WHOLE), 2)
    check(op, Option((V(1, 6),), V(1, 6), Form.PARTS), 2)
    with pytest.raises(AssertionError):
        check(op, Option((R,), R, Form.WHOLE), 2)


def test_a_cut_over_what_a_backward_sums_is_caught() -> None:
    x = real(4, 6)
    with pytest.raises(AssertionError):
        check(op_of(call_of(UnitGradient, x), (x,)), Option((V(1, 6),), V(1, 6), Form.PARTS), 2)


# ---- structure and names


def two_layers(first: Any, second: Any) -> OneBody:
    return OneBody(lambda m, x: second(m.up(first(m.up(x)))))


@pytest.mark.thorough
def test_equal_uses_have_equal_structure_and_others_do_not() -> None:
    def signatures(first: Any, second: Any) -> list[int]:
        program = capture(two_layers(first, second), batch())
        structure = Structure(program)
        return [structure.signature[node] for node in calls_in(program.graph.graph)]

    def rounded(steps: int) -> Any:
        return lambda x: Rounded.apply(x, steps)

    a, b = signatures(rounded(8), rounded(8))
    assert a == b
    for other in (rounded(16), Sign.apply, made_again(), lambda x: Reversed.apply(x, 0.5)):
        a, b = signatures(rounded(8), other)
        assert a != b


def made_again() -> Any:
    class Rounded(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
            return torch.floor(x * steps) / steps

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0], None

    return lambda x: Rounded.apply(x, 8)


def test_functions_of_one_name_are_told_apart_by_their_order() -> None:
    program = capture(two_layers(made_again(), made_again()), batch())
    assert [str(node.target) for node in calls_in(program.graph.graph)] == ["Rounded(_, 8)", "Rounded#2(_, 8)"]


PRINT_HASH = """
from planner import plan
from tests.models.custom_functions import Quantised, Rounded
from tests.models.one_body import SPEC, OneBody
model = OneBody(lambda m, x: Rounded.apply(Quantised.apply(m.up(x), m.scale)[0], 8))
print(plan(model, {**SPEC, "mesh": {"tp": 2}}).hash)
"""


@pytest.mark.thorough
def test_a_plan_has_one_hash_in_every_process() -> None:
    found = {python("-c", PRINT_HASH, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}
    assert len(found) == 1
    assert len(found.pop()) > 8


# ---- random numbers, writes, hidden tensors


def test_random_numbers_of_a_forward_are_drawn_from_a_named_stream() -> None:
    x = real(4, 6)
    facts = call_of(NoisyRound, x).facts
    assert facts.draws
    assert facts.cuts == ()


class NoisyBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * random.random()


class WritesInto(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Hidden(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return (x * module.weight[0]).round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


REFUSED: dict[str, tuple[Any, str, str]] = {
    "random backward": (lambda m, x: NoisyBackward.apply(m.up(x)), "draws random numbers", "draw them in the forward"),
    "a write": (lambda m, x: WritesInto.apply(m.up(x)), "writes into its arguments", "compute a new tensor"),
    "a hidden parameter": (lambda m, x: Hidden.apply(x, m.up), "reads up.weight of the model", "as an argument"),
    "a gradient inside": (
        lambda m, x: x + torch.autograd.grad(Rounded.apply(m.up(x), 8).sum(), x)[0],
        "computes a gradient through Rounded",
        "write the gradient or the Function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_could_not_do_alike_is_refused_with_its_line(name: str) -> None:
    body, what, fix = REFUSED[name]
    with pytest.raises(PlanError, match=what) as caught:
        capture(OneBody(body), batch())
    assert fix in caught.value.fix
    assert caught.value.where.file == __file__
