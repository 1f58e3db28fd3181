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
from torch import Tensor, nn
from torch.func import functional_call

from passes.program.program import Program
from planner.capture.graphs_equal import (
    DEAR,
    InFloat64,
    Truths,
    fixed_scalars,
    mixed,
    ones,
    put_back,
    run_program,
    scalars,
    widened,
)
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
            eager = fixed_scalars(lambda b=batch: functional_call(model, values, (), b))
        if not eager:  # numbers that are no ids of the model, or dropout
            continue
        captured = scalars(lambda b=batch: run_program(InFloat64(program.graph), program, values.__getitem__, b))
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
    return values | {n: widened(b.detach().clone()) for n, b in model.named_buffers()}


def _drawn(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Vectors, such as the weights of norms, near 1; rows of matrices with a norm near 1."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    value = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + noise / 4
    return value.requires_grad_(parameter.requires_grad)


def _batches(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    fills: list[Mapping[str, Callable[[Tensor], Tensor]]] = [dict.fromkeys(inputs, mixed), dict.fromkeys(inputs, ones)]
    counted = (n for n, tensor in inputs.items() if tensor.dim() and not tensor.is_floating_point())
    fills += [{**fills[0], name: _counting} for name in counted]
    for fill in fills:
        yield {name: widened(fill[name](tensor)) for name, tensor in inputs.items()}


def _counting(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.shape[-1]).to(tensor.dtype).expand(tensor.shape).contiguous()


def _is_close(loss: Tensor, other: Tensor) -> bool:
    return torch.allclose(loss.double(), other.double(), rtol=TOLERANCE, atol=1e-7, equal_nan=False)
