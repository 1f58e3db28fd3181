"""Try a rule on numbers: run its op on each part of a factor, and compare with the op on the full operands.

EACH    the parts of the result, put together, are the result         an operand that has the factor: its parts'
SUM     the parts' results, added up, are the result                  gradients put together; one that has not:
                                                                      added up
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from passes.program.ops.aten import aten, has_gradient, named, packet_of, shape_of, with_sizes
from passes.rules.rule import RESULT, Factor, OpRule, Place, Role, operands_of

TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
STATISTICS = ("running_mean", "running_var")  # they have no gradient


def called(target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, dict[str, Tensor]]:
    """Return a graph of one call with its tensors as placeholders, and their values."""
    graph, values = fx.Graph(), dict[str, Tensor]()

    def held(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [held(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(values)}")
        values[node.name], node.meta["val"] = value, value
        return node

    node = graph.call_function(target, tuple(map(held, args)), {k: held(v) for k, v in kwargs.items()})
    given = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    node.meta["val"] = target(*given[0], **given[1])
    return node, values


def tried(node: fx.Node, rule: OpRule, values: dict[str, Tensor]) -> int:
    """Return how many ways to cut factors were compared; AssertionError at the first that differs."""
    number = 0
    for factor in rule.factors:
        if factor.role is Role.MIX or all(p.operand == RESULT for p in factor.places):
            continue
        for parts in (n for n in (2, 3) if factor.size % n == 0):
            _compare(node, factor, values, parts)
            number += 1
    return number


def _compare(node: fx.Node, factor: Factor, values: dict[str, Tensor], parts: int) -> None:
    for name, found, expected in by_parts(node, factor, values, parts):
        told = partial("{}\n{}".format, f"{node.target} {node.args}: {factor} in {parts} parts: {name}")
        near = TOLERANCES.get(expected.dtype, 0.0)
        torch.testing.assert_close(found, expected, rtol=near, atol=near, equal_nan=True, msg=told)


def by_parts(
    node: fx.Node, factor: Factor, values: dict[str, Tensor], parts: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What the parts of a factor make together beside what the full operands make: the result, and each gradient."""
    operands = [values[n.name] for n in operands_of(node)]
    expected, gradients = run_call(node, operands)
    runs = []
    for part in range(parts):
        cut = [_part(x, factor, factor.at(i), parts, part) for i, x in enumerate(operands)]
        made = factor.at(RESULT)
        pulled = _part(_cotangent(expected), factor, made, parts, part) if has_gradient(expected.dtype) else None
        runs.append(run_call(node, cut, pulled, (factor, parts)))
    yield "result", _joined([made for made, _ in runs], factor, factor.at(RESULT), parts), expected
    for i, full in gradients.items():
        yield f"gradient of {i}", _joined([g[i] for _, g in runs], factor, factor.at(i), parts), full


def _cotangent(result: Tensor) -> Tensor:
    return torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape)


def run_call(
    node: fx.Node, operands: list[Tensor], pulled: Tensor | None = None, cut: tuple[Factor, int] | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """The first result on ``operands``, and the gradient by each that has one; ``cut``: with the sizes of a part."""
    statistics = {named(node).get(name) for name in STATISTICS}
    trained = [has_gradient(x.dtype) and n not in statistics for x, n in zip(operands, operands_of(node), strict=True)]
    leaves = [x.detach().requires_grad_(t) for x, t in zip(operands, trained, strict=True)]
    result = _called(node, leaves, cut)
    wanted = {i: x for i, x in enumerate(leaves) if x.requires_grad}
    if not wanted or not result.requires_grad:
        return result.detach(), {}
    pulled = _cotangent(result) if pulled is None else pulled
    found = torch.autograd.grad(result, list(wanted.values()), pulled, materialize_grads=True)
    return result.detach(), dict(zip(wanted, found, strict=True))


def _called(node: fx.Node, operands: list[Tensor], cut: tuple[Factor, int] | None) -> Tensor:
    """Return the first tensor of its result."""
    waiting = list(operands)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: waiting.pop(0))  # pyright: ignore
    if cut is not None:
        args = _local_sizes(node, list(args), *cut)
    made: Any = node.target(*args, **kwargs)  # pyright: ignore
    return made if isinstance(made, Tensor) else made[0]


def _local_sizes(node: fx.Node, args: list[Any], factor: Factor, parts: int) -> list[Any]:
    """Written sizes of a result, and numbers of groups, as a rank's program has them."""
    packet, place = packet_of(node.target), factor.at(RESULT)
    if place is not None:
        args = with_sizes(node, args, [n // parts if d == place.dim else n for d, n in enumerate(shape_of(node))])
    of_groups = {aten.conv1d: 6, aten.conv2d: 6, aten.convolution: 8, aten.group_norm: 1}.get(packet)
    if of_groups is not None and {0, 1, RESULT} <= {p.operand for p in factor.places}:
        args[of_groups] = factor.size // parts
    return args


def _part(x: Tensor, factor: Factor, place: Place | None, parts: int, part: int) -> Tensor:
    if place is None:
        return x
    inside = _opened(x, factor, place).chunk(parts, place.dim + 1)[part]
    return inside.flatten(place.dim, place.dim + 2).clone()  # dense, in the order of memory of the full operand


def _joined(pieces: list[Tensor], factor: Factor, place: Place | None, parts: int) -> Tensor:
    if place is None:
        return torch.stack(pieces).sum(0)
    small = Factor(factor.role, factor.size // parts, factor.places)
    opened = [_opened(piece, small, place) for piece in pieces]
    return torch.cat(opened, place.dim + 1).flatten(place.dim, place.dim + 2)


def _opened(x: Tensor, factor: Factor, place: Place) -> Tensor:
    """Return the dim as [outer, factor, inner]."""
    return x.unflatten(place.dim, [-1, factor.size, place.inner])
