"""The rules of Transformer Engine's make_graphed_callables: what it would refuse, or accept and handle wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runtime.cuda_graphs.te_arguments import GraphArguments


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
