"""The arguments of Transformer Engine's make_graphed_callables for one rank.

    _order                  +c: a forward of chunk c − 1,  −c: its backward;  e.g. 1 1 -1 1 -1 -1
    _num_layers_per_chunk   L_0, L_1, …: the regions of each chunk
    callables               region l of chunk c at             L_0 + … + L_{c−1} + l
    sample_args             its k-th forward of M at     M · (L_0 + … + L_{c−1}) + k · L_c + l

Transformer Engine does not know microbatches: it takes the k-th backward of a chunk for that of its k-th forward.
Inputs of one signature (shapes, dtypes) share static memory in turn, by a first-in-first-out queue, even if only some
require a gradient. It detects neither a backward of another microbatch, nor an input of two regions of which only one
requires the gradient. Tests compare these arguments with its rules (tests.runtime.cuda_graphs.test_te_rules).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.ops.region import RegionCall
from planner.pipeline.message_slots import slots_by_kind
from planner.pipeline.schedule import Order, format_order
from planner.regions.static_memory import Signature, signature

NUM_WARMUP = 3  # Transformer Engine's own warm-up, on its own stream, after the eager steps
WHERE = "cuda_graphs.impl"
_INSTEAD = "use impl: local"


@dataclass(frozen=True)
class GraphArguments:
    """The arguments of make_graphed_callables: ``modules`` and ``sample_args`` by position, the others by name."""

    modules: tuple[nn.Module, ...]
    sample_args: tuple[tuple[Tensor, ...], ...]
    order: list[int]
    num_layers: list[int]
    hooks: list[Any] = field(default_factory=list)  # of each module

    @property
    def named(self) -> dict[str, Any]:
        return {
            "num_warmup_iters": NUM_WARMUP,
            "allow_unused_input": True,  # inputs without a gradient have none eagerly either
            "_order": self.order,
            "_num_layers_per_chunk": self.num_layers,
            "_reuse_graph_input_output_buffers": True,
            "capture_time_hooks": self.hooks,
            "clone_param_grads_on_return": True,  # a tied weight's gradient waits for its other addends
        }


def signed_order(order: Order) -> list[int]:
    """Return the order of actions in Transformer Engine's form."""
    return [action.chunk + 1 if action.kind == "F" else -action.chunk - 1 for action in order]


def numbered(order: Order) -> dict[tuple[int, int], int]:
    """Return (chunk, microbatch) → index of its forward among those of the chunk."""
    counts = Counter[int]()
    numbers: dict[tuple[int, int], int] = {}
    for action in order:
        if action.kind == "F":
            numbers[action.chunk, action.microbatch] = counts[action.chunk]
            counts[action.chunk] += 1
    return numbers


def sample_index(order: Order, num_layers: Sequence[int], chunk: int, number: int, layer: int) -> int:
    """Return the index of the inputs, and of the graph, of a layer in the ``number``-th forward of a chunk."""
    num_microbatches = len(order) // len(num_layers) // 2
    return num_microbatches * sum(num_layers[:chunk]) + number * num_layers[chunk] + layer


def sample_args_of(
    order: Order, chunks: Sequence[Sequence[RegionCall]], device: torch.device
) -> tuple[tuple[Tensor, ...], ...]:
    """Return the static inputs of each forward, in the order of ``sample_args``; shared memory is the same tensors.

    An input requires a gradient if any input with its signature does.
    """
    kinds = [[signature(call.inputs) for call in chunk] for chunk in chunks]
    needed: dict[Signature, list[bool]] = {}
    for call in (call for chunk in chunks for call in chunk):
        kind = signature(call.inputs)
        before = needed.get(kind, [False] * len(kind))
        needed[kind] = [a or value.requires_grad for a, value in zip(before, call.inputs, strict=True)]
    number, num_layers = numbered(order), [len(chunk) for chunk in chunks]
    static: dict[int, tuple[Tensor, ...]] = {}
    samples: dict[int, tuple[Tensor, ...]] = {}
    for (microbatch, chunk, layer), slot in slots_by_kind(order, kinds).items():
        kind = kinds[chunk][layer]
        if slot not in static:
            static[slot] = _static(kind, needed[kind], device)
        samples[sample_index(order, num_layers, chunk, number[chunk, microbatch], layer)] = static[slot]
    return tuple(samples[place] for place in sorted(samples))


def _static(kind: Signature, needed: Sequence[bool], device: torch.device) -> tuple[Tensor, ...]:
    """Return static inputs of zeros: a warm-up reads them, and zero is a valid index."""
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in kind]
    return tuple(value.requires_grad_(need) for value, need in zip(tensors, needed, strict=True))


def check_microbatches(order: Order) -> None:
    """Raise PlanError unless the backwards of each chunk have the order of its forwards, as signed orders imply."""
    chunks = sorted({action.chunk for action in order})
    for chunk in chunks:
        forwards, backwards = (
            [a.microbatch for a in order if (a.kind, a.chunk) == (kind, chunk)] for kind in ("F", "B")
        )
        if forwards != backwards:
            raise PlanError(
                "transformer_engine matches the k-th backward of a chunk with its k-th forward, but those of "
                f"chunk {chunk} run in another order: {format_order(order)}",
                where="pipeline.schedule",
                fix=f"use gpipe, 1f1b or interleaved_1f1b, or {_INSTEAD}",
            )


def check_autocast() -> None:
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        what = "Transformer Engine captures no graphs under autocast with a cache"
        raise PlanError(what, where=WHERE, fix="run the engine outside autocast: the spec sets its precision")
