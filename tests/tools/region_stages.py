"""Stages of regions made by hand, and a walk over an order that runs them: small enough for every schedule.

x = x + region(x, side)      side: a number for each element, with or without a gradient of its own
x = x + sign · region        where the region gives ``sign`` too, in front, and without a gradient
x = x + region(x, side)      where nothing that the region reads has a gradient
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from passes.base import RankProgram, StageModule
from passes.ops.random_state import RandomState
from passes.ops.region import RegionCall, run_region
from passes.program.program import BoundaryPlan
from planner.pipeline.schedule import Order

SHAPE = (2, 3)
Walked = tuple[list[Tensor], dict[str, Tensor]]


class Kind(NamedTuple):
    """Of a region: whether its side carries a gradient, whether it gives a sign, whether it is without gradients."""

    side: bool = True
    sign: bool = False
    still: bool = False


def program_of(chunks: Sequence[Sequence[bool | Kind]]) -> RankProgram:
    """For each region of each chunk its kind, or whether its side carries a gradient."""
    torch.manual_seed(1)
    first, stages = 0, []
    for chunk, given in enumerate(chunks):
        kinds = [kind if isinstance(kind, Kind) else Kind(kind) for kind in given]
        stages.append(_stage(chunk, first, kinds))
        first += len(kinds)
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


def _stage(chunk: int, first: int, kinds: Sequence[Kind]) -> StageModule:
    root, graph = nn.Module(), fx.Graph()
    x, side = graph.placeholder("x"), graph.placeholder("side")
    still_side = graph.call_method("detach", (side,))
    for i, kind in enumerate(kinds):
        setattr(root, f"region_{first + i}", _region(first + i, kind))
        weight = nn.Parameter(torch.randn(SHAPE[1], SHAPE[1], dtype=torch.float64), requires_grad=not kind.still)
        root.register_parameter(f"weight_{i}", weight)
        handle, held = graph.get_attr(f"region_{first + i}"), graph.get_attr(f"weight_{i}")
        read = graph.call_method("detach", (x,)) if kind.still else x
        given = [read, side if kind.side and not kind.still else still_side]
        made = graph.call_function(run_region, (handle, given, [held]))
        outputs = [graph.call_function(operator.getitem, (made, place)) for place in range(1 + kind.sign)]
        added = graph.call_function(operator.mul, tuple(outputs)) if kind.sign else outputs[0]
        x = graph.call_function(operator.add, (x, added))
    graph.output((x,))
    return StageModule(chunk, chunk, fx.GraphModule(root, graph), (), (), (), (), (), (), {}, False)


def _region(index: int, kind: Kind) -> RegionCall:
    inputs = [_value("x", not kind.still), _value("side", kind.side and not kind.still)]
    if kind.sign:
        module = fx.symbolic_trace(lambda x, side, w: (torch.sign((x * side).detach()), torch.tanh((x * side) @ w)))
        return RegionCall(index, module, inputs, [_value("sign", False), _value("y", not kind.still)])
    module = fx.symbolic_trace(lambda x, side, w: (torch.tanh((x * side) @ w),))
    return RegionCall(index, module, inputs, [_value("y", not kind.still)])


def _value(name: str, requires_grad: bool = True) -> BoundaryPlan:
    return BoundaryPlan(name, SHAPE, "float64", 8 * SHAPE[0] * SHAPE[1], requires_grad=requires_grad)


def _random(*seed: int) -> Tensor:
    number = sum(part * 100**i for i, part in enumerate(seed))
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
