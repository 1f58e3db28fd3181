"""The rules of Transformer Engine's make_graphed_callables: what it would refuse, or accept and handle wrongly."""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from passes.errors import PlanError
from planner.pipeline.message_slots import order_by_microbatch
from planner.pipeline.schedule import Action, Order, build_schedule
from planner.pipeline.simulate import parse_order
from runtime.cuda_graphs import te_arguments
from runtime.cuda_graphs.te_arguments import GraphArguments, check_autocast, numbered, sample_index, signed_order
from runtime.cuda_graphs.transformer_engine import TransformerEngineGraphs
from tests.tools.paths import ORACLES
from tests.tools.region_stages import program_of
from tests.tools.schedules import schedules


def check_arguments(given: GraphArguments) -> None:
    """Raises ValueError for arguments that make_graphed_callables would refuse, or accept and handle wrongly."""
    check_order(given.order, given.num_layers)
    _check_counts(given)
    _check_modules(given.modules)
    _check_samples(given)


def check_order(order: Sequence[int], num_layers: Sequence[int]) -> None:
    """Integers, each chunk with as many forwards as backwards and as every other, no backward too early."""
    if not order or not all(type(number) is int and number != 0 for number in order):
        raise ValueError(f"an order consists of integers other than 0, not {list(order)}")
    chunks = max(map(abs, order))
    if chunks != len(num_layers):
        raise ValueError(f"the order names {chunks} chunks, but there are layers for {len(num_layers)}")
    if any(type(n) is not int or n < 0 for n in num_layers):
        raise ValueError(f"numbers of layers are integers, not {list(num_layers)}")
    count = Counter(order)
    sizes = {count[sign * (chunk + 1)] for chunk in range(chunks) for sign in (1, -1)}
    if len(sizes) != 1:
        counted = ", ".join(f"{count[c + 1]} and {count[-c - 1]} for chunk {c}" for c in range(chunks))
        raise ValueError(f"all chunks need the same number of forwards and backwards, not {counted}")
    waiting = Counter[int]()
    for place, number in enumerate(order):
        waiting[abs(number)] += 1 if number > 0 else -1
        if waiting[abs(number)] < 0:
            raise ValueError(f"a backward of chunk {abs(number) - 1} comes before its forward, at place {place}")


def _check_counts(given: GraphArguments) -> None:
    total, num_microbatches = sum(given.num_layers), len(given.order) // len(given.num_layers) // 2
    if len(given.modules) != total:
        raise ValueError(f"there are {total} layers, but {len(given.modules)} modules for them")
    if len(given.hooks) != total:
        raise ValueError(f"there are {total} layers, but hooks of {len(given.hooks)}")
    if len(given.sample_args) != total * num_microbatches:
        raise ValueError(
            f"there are {total} layers · {num_microbatches} microbatches, but {len(given.sample_args)} inputs"
        )


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ValueError(f"callable {number} is not a module but a {type(module).__name__}")
        if not module.training:
            raise ValueError(f"module {number} is in eval mode: its graph would never run in training")
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            raise ValueError(f"module {number} has hooks, which a graph does not run")
        trained = [name for name, buffer in module.named_buffers() if buffer.requires_grad]
        if trained:
            raise ValueError(f"buffers of module {number} require a gradient: {', '.join(trained)}")


def _check_samples(given: GraphArguments) -> None:
    needed: dict[tuple[Any, ...], tuple[bool, ...]] = {}
    for number, sample in enumerate(given.sample_args):
        if not all(isinstance(value, Tensor) for value in sample):
            raise ValueError(f"input {number} contains values that are not tensors")
        key = tuple((value.shape, value.dtype, value.layout) for value in sample)
        wants = tuple(value.requires_grad for value in sample)
        if needed.setdefault(key, wants) != wants:
            raise ValueError(f"input {number} shares memory with an input that gets gradients elsewhere")


CPU = torch.device("cpu")
CASES = [c for c in json.loads((ORACLES / "schedules.json").read_text())["cases"] if c.get("num_layers_per_chunk")]


def order_of(case: dict[str, Any]) -> Order:
    return tuple(Action(*step) for step in case["steps"])


def graphs_of(order: Order, num_layers: list[int]) -> TransformerEngineGraphs:
    return TransformerEngineGraphs(program_of([[True] * n for n in num_layers]), order, CPU)


# ---- what is right passes


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["id"]))
def test_orders_and_shared_inputs_are_those_of_the_oracle(case):
    """An order whose backwards directly follow their forwards is given for one microbatch: its graphs serve all."""
    order, layers = order_of(case), case["num_layers_per_chunk"]
    assert signed_order(order) == case["order"]
    check_order(case["order"], layers)
    made = graphs_of(order, layers).arguments()
    check_arguments(made)
    assert len({id(sample[0]) for sample in made.sample_args}) == case["num_unique_static_input_buffers"]
    assert made.order in (case["order"], [1, -1])
    if made.order == case["order"]:
        named = {
            buffer: id(s[0]) for buffer, s in zip(case["static_input_buffer_of_slot"], made.sample_args, strict=True)
        }
        found = [id(sample[0]) for sample in made.sample_args]
        assert [named[buffer] for buffer in case["static_input_buffer_of_slot"]] == found


@given(schedules(), st.data())
def test_every_order_of_a_schedule_passes_and_every_forward_has_a_place_of_its_own(schedule, data):
    order = schedule.orders[data.draw(st.integers(0, schedule.pp - 1))]
    layers = [data.draw(st.integers(0, 3)) for _ in range(schedule.vpp)]
    check_order(signed_order(order), layers)
    places = [
        sample_index(order, layers, chunk, number, layer)
        for (chunk, _), number in numbered(order).items()
        for layer in range(layers[chunk])
    ]
    assert sorted(places) == list(range(sum(layers) * schedule.num_microbatches))


@given(schedules(), st.data())
def test_an_order_that_lost_gained_or_swapped_an_action_is_refused(schedule, data):
    order = signed_order(schedule.orders[data.draw(st.integers(0, schedule.pp - 1))])
    place = data.draw(st.integers(0, len(order) - 1))
    with pytest.raises(ValueError, match=r"forwards and backwards|before its forward|integers|names"):
        check_order(order[:place] + order[place + 1 :], [2] * schedule.vpp)
    with pytest.raises(ValueError, match=r"forwards and backwards|before its forward|integers|names"):
        check_order([*order, order[place]], [2] * schedule.vpp)
    with pytest.raises(ValueError, match="before its forward"):
        check_order(order[::-1], [2] * schedule.vpp)


@given(schedules())
def test_microbatches_have_graphs_of_their_own_where_they_overlap(schedule):
    for order in schedule.orders:
        overlap = any(a.kind == b.kind == "F" for a, b in pairwise(order))
        kept = order_by_microbatch(order)
        assert kept == (order if overlap else order[:2])


# ---- what is wrong is refused


@pytest.mark.parametrize(
    ("order", "layers", "why"),
    [
        ([], [1], "integers other than 0"),
        ([1, 0, -1], [1], "integers other than 0"),
        ([1, -1, -1.5], [1], "integers other than 0"),
        ([1, 2, -2, -1], [1], "names 2 chunks, but there are layers for 1"),
        ([1, -1], [1, 1], "names 1 chunks, but there are layers for 2"),
        ([1, -1], [-1], "numbers of layers"),
        ([1, -1], [1.0], "numbers of layers"),
        ([2, -2], [1, 1], "not 0 and 0 for chunk 0, 1 and 1 for chunk 1"),
        ([1, 1, 1, 2, -1, -1, -1, -2], [1, 1], "not 3 and 3 for chunk 0, 1 and 1 for chunk 1"),
        ([1, 1, -1], [1], "not 2 and 1 for chunk 0"),
        ([1, -1, -1, 1], [1], "backward of chunk 0 comes before its forward, at place 2"),
    ],
)
def test_a_wrong_order_is_refused(order, layers, why):
    with pytest.raises(ValueError, match=why):
        check_order(order, layers)


def arguments() -> GraphArguments:
    return graphs_of(build_schedule("1f1b", 2, 4).orders[0], [2]).arguments()


def with_module(change: Callable[[nn.Module], Any]) -> Callable[[GraphArguments], GraphArguments]:
    return lambda made: (change(made.modules[1]), made)[1]


def with_sample(*values: Any) -> Callable[[GraphArguments], GraphArguments]:
    return lambda made: replace(made, sample_args=(values, *made.sample_args[1:]))


WRONG: dict[str, tuple[Callable[[GraphArguments], GraphArguments], str]] = {
    "a module missing": (lambda made: replace(made, modules=made.modules[:-1]), "2 layers, but 1 modules"),
    "hooks missing": (lambda made: replace(made, hooks=[]), "2 layers, but hooks of 0"),
    "an input missing": (lambda made: replace(made, sample_args=made.sample_args[1:]), "4 microbatches, but 7 inputs"),
    "no module": (
        lambda made: replace(made, modules=(made.modules[0], print)),
        "callable 1 is not a module but a builtin",
    ),  # type: ignore[arg-type]
    "evaluation": (with_module(lambda m: m.eval()), "module 1 is in eval mode"),
    "a hook": (with_module(lambda m: m.register_forward_hook(print)), "module 1 has hooks"),
    "a hook before": (with_module(lambda m: m.register_full_backward_pre_hook(print)), "module 1 has hooks"),
    "a trained buffer": (
        with_module(lambda m: m.register_buffer("shift", torch.zeros(1, requires_grad=True))),
        "buffers of module 1 require a gradient: shift",
    ),
    "a number": (with_sample(torch.zeros(2), 3), "input 0 contains values that are not tensors"),
    "no gradient": (
        lambda made: with_sample(*(torch.zeros_like(t) for t in made.sample_args[0]))(made),
        "shares memory with an input that gets gradients",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    change, why = WRONG[name]
    made = arguments()
    check_arguments(made)
    with pytest.raises(ValueError, match=why):
        check_arguments(change(made))


def test_backwards_in_another_order_than_forwards_are_refused():
    with pytest.raises(PlanError, match=r"with its k-th forward, .*chunk 0 .*: F0.0 F1.0 B1.0 B0.0"):
        graphs_of(parse_order("F0.0 F1.0 B1.0 B0.0"), [1])


def test_autocast_with_a_cache_is_refused(monkeypatch):
    check_autocast()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    with pytest.raises(PlanError, match="autocast"):
        check_autocast()


def test_a_missing_package_is_one_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(PlanError, match="needs the package transformer_engine") as caught:
        graphs_of(parse_order("F0.0 B0.0"), [1]).capture()
    assert "meshwright[gpu]" in caught.value.fix


def test_a_rank_without_regions_captures_nothing():
    graphs = graphs_of(parse_order("F0.0 B0.0"), [0])
    graphs.capture()
    assert (graphs.num_graphs, graphs.static_bytes) == (0, 0)


# ---- what is given where


def test_an_input_has_a_gradient_where_another_of_its_signature_does():
    """Transformer Engine would share the memory all the same, and one of the two would lose its gradient."""
    order = build_schedule("1f1b", 2, 4).orders[0]
    for sides, wanted in (([True, False], True), ([False, False], False)):
        made = TransformerEngineGraphs(program_of([sides]), order, CPU).arguments()
        assert {sample[1].requires_grad for sample in made.sample_args} == {wanted}


def test_weights_of_a_region_are_parameters_of_its_module_and_stay_the_same_objects():
    program = program_of([[True, True]])
    made = TransformerEngineGraphs(program, build_schedule("1f1b", 2, 4).orders[0], CPU).arguments()
    weights = list(program.stages[0].module.parameters())
    assert all(next(m.parameters()) is weights[i] for i, m in enumerate(made.modules))


# ---- recorded facts of the package


def test_only_recorded_parameters_are_given(te_facts):
    known = {p["name"]: p for p in te_facts["parameters"]}
    assert known.keys() >= arguments().named.keys()
    assert [p["name"] for p in te_facts["parameters"]][:2] == ["modules", "sample_args"]
    assert arguments().named["_order"] == [1, 1, -1, 1, -1, 1, -1, -1]


def test_each_recorded_check_has_a_rule_of_ours_or_a_reason(te_facts):
    for recorded in te_facts["checks"].values():
        for compared, rule in recorded.items():
            ours = globals().get(rule, getattr(te_arguments, rule, None))
            assert rule.startswith("never: ") or callable(ours), compared


def test_orders_shuffled_at_random_are_refused_unless_they_are_orders():
    """Against a slow reading of the rules: counts, and backwards after forwards."""
    draw = random.Random(0)
    passed = 0
    for _ in range(2000):
        order = [draw.choice([1, -1, 2, -2]) for _ in range(draw.choice([4, 8]))]
        prefixes = [order[: i + 1] for i in range(len(order))]
        right = all(p.count(c) >= p.count(-c) for p in prefixes for c in (1, 2)) and (
            order.count(1) == order.count(-1) == order.count(2) == order.count(-2)
        )
        try:
            check_order(order, [1, 1])
        except ValueError:
            assert not right, order
        else:
            assert right, order
            passed += 1
    assert passed > 20
