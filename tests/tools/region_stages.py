"""Stages of regions made by hand, and a walk over an order that runs them: small enough for every schedule.

x = x + region(x, side)      side: a number for each element, with or without a gradient of its own
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from passes.ops.random_state import RandomState
from passes.ops.region import RegionCall, run_region
from passes.stage_module import RankProgram, StageModule
from planner.pipeline.schedule import Order
from planner.sharding.boundaries import BoundaryPlan

SHAPE = (2, 3)
Walked = tuple[list[Tensor], dict[str, Tensor]]


def program_of(chunks: Sequence[Sequence[bool]]) -> RankProgram:
    """For each region of each chunk, whether its side carries a gradient."""
    torch.manual_seed(1)
    first, stages = 0, []
    for chunk, sides in enumerate(chunks):
        stages.append(_stage(chunk, first, sides))
        first += len(sides)
    return RankProgram(stages, {}, RandomState(0, 0))


def walk(program: RankProgram, order: Order, before_forward=lambda action: None) -> Walked:
    """Outputs and gradients of inputs in their order, and the gradients of weights."""
    found: list[Tensor] = []
    open_: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    for action in order:
        place = action.chunk, action.microbatch
        if action.kind == "F":
            x, side = (_random(*place, i).requires_grad_() for i in (0, 1))
            before_forward(action)
            (y,) = program.stages[action.chunk].module(x, side)
            found.append(y.detach().clone())
            open_[place] = x, side, y
        else:
            x, side, y = open_.pop(place)
            torch.autograd.backward(y, _random(*place, 2)) if y.requires_grad else None
            found += [t.grad for t in (x, side) if t.grad is not None]
    weights = {f"{s.chunk}.{n}": p for s in program.stages for n, p in s.module.named_parameters()}
    gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
    for parameter in weights.values():
        parameter.grad = None
    return found, gradients


def same(a: Walked, b: Walked) -> bool:
    """To the last bit."""
    pairs = [*zip(a[0], b[0], strict=True), *((a[1][name], b[1][name]) for name in a[1])]
    return a[1].keys() == b[1].keys() and all(torch.equal(x, y) for x, y in pairs)


def _stage(chunk: int, first: int, sides: Sequence[bool]) -> StageModule:
    root, graph = nn.Module(), fx.Graph()
    x, side = graph.placeholder("x"), graph.placeholder("side")
    still = graph.call_method("detach", (side,))
    for i, has_gradient in enumerate(sides):
        setattr(root, f"region_{first + i}", _region(first + i, has_gradient))
        root.register_parameter(f"weight_{i}", nn.Parameter(torch.randn(SHAPE[1], SHAPE[1], dtype=torch.float64)))
        handle, weight = graph.get_attr(f"region_{first + i}"), graph.get_attr(f"weight_{i}")
        made = graph.call_function(run_region, (handle, [x, side if has_gradient else still], [weight]))
        x = graph.call_function(operator.add, (x, graph.call_function(operator.getitem, (made, 0))))
    graph.output((x,))
    return StageModule(chunk, chunk, fx.GraphModule(root, graph), (), (), (), (), (), (), {}, False)


def _region(index: int, side_has_gradient: bool) -> RegionCall:
    module = fx.symbolic_trace(lambda x, side, weight: (torch.tanh((x * side) @ weight),))
    return RegionCall(index, module, [_value("x"), _value("side", side_has_gradient)], [_value("y")])


def _value(name: str, requires_grad: bool = True) -> BoundaryPlan:
    return BoundaryPlan(name, SHAPE, "float64", 8 * SHAPE[0] * SHAPE[1], requires_grad=requires_grad)


def _random(*seed: int) -> Tensor:
    number = sum(part * 100**i for i, part in enumerate(seed))
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
