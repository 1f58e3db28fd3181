"""Do both sides of a branch on tracing compute the same loss? Seen with drawn values, also for a model without any.

    if not is_tracing(x) and (x == 0).all(): mask = None        eager mode skips a mask that masks nothing

Eager mode and the captured graph run in float64 on drawn weights, on batches that together take both sides:

    integers 0 and 1        ids, labels and masks alike
    integers 1              no padding
    one input counts        0 1 2 …: positions of one document

So a model on the meta device is compared too, and one that is captured in another dtype than its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from passes.program.program import Program
from planner.capture.graphs_equal import DEAR, Truths, mixed, ones, put_back, scalars
from planner.capture.model.eager import caches_off, in_eager_mode
from planner.capture.model.exchange import has_values

TOLERANCE = 2e-5  # a forward in float64 still computes norms or its loss in float32
MOST_ELEMENTS = 1 << 26  # of weights


def agrees_on_both_sides(model: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> bool:
    """Whether the loss in eager mode is that of the graph on batches that took each branch on a value."""
    values = _drawn_values(model)
    if values is None or sum(v.numel() for v in values.values()) * _num_tokens(inputs) > DEAR:
        return False
    read = defaultdict[str, set[Any]](set)
    for batch in _batches(inputs):
        truths = Truths(model)
        with put_back(model), in_eager_mode(), caches_off(model), truths:
            before = torch.get_rng_state()
            eager = scalars(lambda b=batch: functional_call(model, values, (), b))
            draws = not torch.equal(before, torch.get_rng_state())
        if not eager or draws:  # numbers that are no ids of the model, or dropout
            continue
        captured = scalars(lambda b=batch: _in_float64(program, values, b))
        if not captured or not any(_is_close(loss, captured[0]) for loss in eager):
            return False
        for line, answers in truths.read.items():
            read[line] |= answers
    return bool(read) and all(len(answers) == 2 for answers in read.values())


def _num_tokens(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in inputs.values())


def _drawn_values(model: nn.Module) -> dict[str, Tensor] | None:
    """By name: parameters are drawn, buffers their own; None if there are too many, or one is no dense real tensor."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    is_plain = all(t.layout is torch.strided and not t.is_complex() for t in tensors.values())
    if not is_plain or sum(t.numel() for t in tensors.values()) > MOST_ELEMENTS:
        return None
    if not all(has_values(buffer) and buffer.device.type == "cpu" for buffer in model.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    values = {n: _drawn(p, generator) for n, p in model.named_parameters()}
    return values | {n: _wide(b.detach().clone()) for n, b in model.named_buffers()}


def _drawn(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors, such as the weights of norms, near 1; rows of matrices with a norm near 1."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    value = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + noise / 4
    return value.requires_grad_(parameter.requires_grad)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _batches(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    fills: list[Mapping[str, Callable[[Tensor], Tensor]]] = [dict.fromkeys(inputs, mixed), dict.fromkeys(inputs, ones)]
    counted = (n for n, tensor in inputs.items() if tensor.dim() and not tensor.is_floating_point())
    fills += [{**fills[0], name: _counting} for name in counted]
    for fill in fills:
        yield {name: _wide(fill[name](tensor)) for name, tensor in inputs.items()}


def _counting(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[-1]).to(tensor.dtype).expand(tensor.shape).contiguous()


def _is_close(loss: Tensor, other: Tensor) -> bool:
    return torch.allclose(loss.double(), other.double(), rtol=TOLERANCE, atol=1e-7, equal_nan=False)


def _in_float64(program: Program, values: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Any:
    given: list[Any] = []
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.constants:
            given.append(_wide(program.constants[node.name].clone()))
        elif node.name in program.inputs:
            given.append(batch[program.inputs[node.name]])
        else:
            given.append(values[program.parameters.get(node.name) or program.buffers[node.name]].detach().clone())
    with torch.no_grad():
        return _Wide(program.graph).run(*given)


class _Wide(fx.Interpreter):
    """Casts to float64 in the place of those to another float."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_wide_dtype, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
