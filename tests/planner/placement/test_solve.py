"""The integer program finds what trying every typing of a small graph finds, for any weights; conversions of types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from passes.blocks.blocks import find_blocks
from passes.errors import PlanError
from passes.partition.typings.table import Option
from passes.types.conversions import ALL_TO_ALL, TABLE, conversion
from passes.types.types import I, P, Placement, R, V
from planner.capture.export import capture
from planner.placement.candidates import Candidates, Cutting
from planner.placement.decide import _costs, _edges
from planner.placement.solve import Costs, Edge, Weights, _Program, solve
from tests.tools.examples import examples

WIDTH, INNER = 5, 16


class Small(nn.Module):
    """Two matrices, three vectors, and what ``way`` makes of them; the loss is a mean of squares."""

    def __init__(self, way: Callable[[Small, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.before, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x).square().mean()


def two_readers(m: Small, x: Tensor) -> Tensor:
    return m.down(m.up(x) * F.silu(F.linear(x, m.up.weight)))


WAYS: dict[str, Callable[[Small, Tensor], Tensor]] = {
    "mlp": lambda m, x: m.down(F.gelu(m.up(x))),
    "two readers of one f": lambda m, x: two_readers(m, x * m.before + m.shift),
    "residual": lambda m, x: x + m.down(m.up(x) * m.scale),
    "statistics between": lambda m, x: m.down(F.layer_norm(m.up(x), [INNER])),
    "vectors": lambda m, x: (x.sum(-1, keepdim=True) * m.scale).softmax(-1),
}


@dataclass
class Problem:
    """What ``solve`` is asked: the loss has to be the same on every rank."""

    candidates: Candidates
    costs: Costs
    edges: Mapping[str, list[Edge]]


@cache
def problem(way: str, tp: int) -> Problem:
    program = capture(Small(WAYS[way]), {"x": torch.empty(2, WIDTH)})
    nodes = [n for n in program.graph.graph.nodes if n.op != "output"]
    rep, blocks = {n.name: n.name for n in nodes}, find_blocks(program)
    edges, producers, readers = _edges(program, nodes, rep, {})
    candidates = Candidates(nodes, Cutting(tp), producers, readers)
    options = candidates.options[program.loss]
    candidates.options[program.loss] = [o for o in options if o.out.kind == "I"]
    return Problem(candidates, _costs(program, nodes, rep, blocks, {}), edges)


def typings(asked: Problem, weights: Weights) -> Iterator[float]:
    """The cost of each typing that is cheaper than all before it; conversions count once for all their readers."""
    prices = _Program(asked.candidates, asked.costs, asked.edges, weights)
    best = inf

    def search(
        nodes: list[fx.Node], chosen: dict[str, Option], paid: frozenset[object], cost: float
    ) -> Iterator[float]:
        nonlocal best
        if cost >= best:
            return
        if not nodes:
            best = cost
            yield cost
            return
        node, *rest = nodes
        for index, option in enumerate(asked.candidates.options[node.name]):
            changes = changes_of(asked, prices, chosen, node, option)
            if changes is not None:
                new = {key: price for key, price in changes.items() if key not in paid}
                total = cost + prices._option_cost(node, option, index) + sum(new.values())
                yield from search(rest, chosen | {node.name: option}, paid | new.keys(), total)

    yield from search(asked.candidates.nodes, {}, frozenset(), 0.0)


def changes_of(
    asked: Problem, prices: _Program, chosen: Mapping[str, Option], node: fx.Node, option: Option
) -> dict[tuple[Edge, Placement, Placement, bool], float] | None:
    """Each change of type that ``option`` needs of what was chosen before, with its price; None where one cannot be."""
    found = {}
    for position, after in enumerate(option.args):
        for edge in asked.edges[f"{node.name}:{position}"]:
            before, picks = chosen[edge.value.name].out, option.attends and after.is_sharded
            price = prices._conversion_cost(edge.value, before, after, picks, len(edge.copies))
            if price is None:
                return None
            found[edge, before, after, picks] = price
    return found


def cost_of(asked: Problem, weights: Weights, answer: Mapping[str, Option]) -> float:
    """Of one typing, by the same prices."""
    prices = _Program(asked.candidates, asked.costs, asked.edges, weights)
    cost, paid = 0.0, {}
    for node in asked.candidates.nodes:
        option = answer[node.name]
        changes = changes_of(asked, prices, answer, node, option)
        assert changes is not None, f"{node.name} reads what cannot become {option.args}"
        paid |= changes
        cost += prices._option_cost(node, option, asked.candidates.options[node.name].index(option))
    return cost + sum(paid.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_cheaper_than_the_answer(way: str, tp: int):
    asked = problem(way, tp)
    answer = solve(asked.candidates, asked.costs, asked.edges, Weights()).options
    assert cost_of(asked, Weights(), answer) == pytest.approx(min(typings(asked, Weights())), abs=1e-5)


SIZE = st.floats(0.0, 20.0)


@examples(25, phases=[Phase.generate])  # a failing case is small as it is
@given(
    way=st.sampled_from(sorted(WAYS)),
    weights=st.builds(
        Weights, flops=SIZE, parameters=SIZE, bytes=SIZE, call=SIZE, step=SIZE, reshard=SIZE, whole=SIZE, detour=SIZE
    ),
)
def test_nothing_is_cheaper_whatever_the_weights(way: str, weights: Weights):
    asked = problem(way, 2)
    answer = solve(asked.candidates, asked.costs, asked.edges, weights).options
    assert cost_of(asked, weights, answer) == pytest.approx(min(typings(asked, weights)), abs=1e-4)


def test_an_mlp_is_cut_by_columns_then_rows():
    asked = problem("mlp", 2)
    answer = solve(asked.candidates, asked.costs, asked.edges, Weights()).options
    lines = [f"{name}: {' '.join(map(str, o.args))} -> {o.out}   {o.form.value}" for name, o in answer.items()]
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
p_before:  -> I   whole
p_shift:  -> I   whole
p_scale:  -> I   whole
p_up_weight:  -> V(0:16)   parts
p_up_bias:  -> V(0:16)   parts
p_down_weight:  -> V(1:16)   parts
x:  -> I   whole
linear: I V(0:16) -> V(1:16)   column
linear_1: V(1:16) V(0:16) -> V(1:16)   parts
gelu: V(1:16) -> V(1:16)   parts
linear_2: V(1:16) V(1:16) -> P   row
square: I -> I   whole
mean: I -> I   whole
""",
    )


def test_readers_of_one_value_pay_for_its_f_once():
    """Its f costs 1, and so does the sum at the end; with an f for each reader, computing all (2.5) is cheaper."""
    asked = problem("two readers of one f", 2)
    weights = Weights(flops=5.0, parameters=0.0, bytes=0.0, call=1.0, step=100.0, reshard=100.0)
    answer = solve(asked.candidates, asked.costs, asked.edges, weights).options
    assert [str(answer[name].out) for name in ("linear", "linear_2")] == ["V(1:16)", "V(1:16)"]
    assert cost_of(asked, weights, answer) == pytest.approx(min(typings(asked, weights)), abs=1e-3)


def test_on_one_rank_every_value_is_the_same_on_all():
    asked = problem("mlp", 1)
    answer = solve(asked.candidates, asked.costs, asked.edges, Weights()).options
    assert {str(p) for option in answer.values() for p in (*option.args, option.out)} == {"I"}


def test_where_no_typing_is_left_it_is_an_error_with_a_fix():
    asked = problem.__wrapped__("mlp", 2)
    options = asked.candidates.options
    options["p_up_weight"] = [o for o in options["p_up_weight"] if o.out.is_sharded]
    for node in asked.candidates.nodes:
        if node.op == "call_function":
            options[node.name] = [o for o in options[node.name] if o.whole]
    with pytest.raises(PlanError, match="no way to shard the model satisfies every constraint") as caught:
        solve(asked.candidates, asked.costs, asked.edges, Weights())
    assert caught.value.fix == "remove an override, or use tp: 1"


# ---- which type may become which, and what moves for it


TYPES = (I, R, P, V(0, 4))


@pytest.mark.parametrize("value", TYPES, ids=str)
def test_what_is_read_as_it_is_made_moves_nothing(value: Placement):
    found = conversion(value, value, grad=True, parameter=False)
    assert found is not None
    assert (found.forward, found.backward) == ("", "")


def test_the_backward_of_a_change_is_that_of_the_change_back():
    """f: I → R sums gradients as g: P → I sums values; and so gather and scatter."""
    for there, back in ((("I", "R"), ("P", "I")), (("V", "R"), ("P", "V"))):
        a, b = TABLE[there], TABLE[back]
        assert (a.forward, a.backward) == (b.backward, b.forward)


def test_a_parameter_is_never_gathered_and_a_cut_moves_to_another_dim_only_where_allowed():
    assert conversion(V(0, 4), R, grad=True, parameter=True) is None
    assert conversion(V(0, 4), V(1, 4), grad=True, parameter=False) is None
    moved = conversion(V(0, 4), V(1, 4), grad=True, parameter=False, exchange=True)
    assert moved is not None
    assert moved.forward == ALL_TO_ALL


def test_without_a_gradient_only_the_forward_counts():
    for before in TYPES:
        for after in TYPES:
            found = conversion(before, after, grad=False, parameter=False)
            assert found is None or found.backward == ""


@pytest.mark.parametrize("tp", [2, 4, 64])
def test_the_weights_keep_the_bounds_that_their_docstring_derives(tp: int):
    weights, share = Weights(), 1 - 1 / tp
    moved = 16 * (weights.bytes + weights.call)
    assert moved < share * weights.parameters
    assert weights.parameters + moved < share * weights.flops
    assert weights.parameters + moved < weights.reshard < share * weights.flops
    assert weights.parameters + moved < weights.logits
    assert 2 * (weights.bytes + weights.call) < weights.detour < moved
