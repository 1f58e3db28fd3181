"""CUDA graphs emulated on any device: the memory of real ones, and what goes wrong with it.

    forward     inputs → copied into the slot's static inputs → the region → copied into its static outputs
    backward    gradients → copied into static gradients → the region's backward → copied out, those of weights too
    after it    the slot is free: what stood in it is NaN

A graph reads and writes fixed addresses and gives no warning. So here no version of a tensor is looked at: a slot that
is used again too early, a tensor that is kept over a replay, or a copy that is left out, gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ops.region import RegionCall, run_eagerly
from passes.stage_module import RankProgram
from planner.pipeline.schedule import Action
from planner.sharding.boundaries import BoundaryPlan


class Emulation:
    """Runs the regions of a rank in static memory while it ``is_on``; else, and without gradients, eagerly.

    ``slots``: (chunk, microbatch) → slot, by the plan. Owns: the static memory of each (region, slot), made at its
    first use; and the count of replays.
    """

    def __init__(self, program: RankProgram, slots: Mapping[tuple[int, int], int], device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.is_on = False
        self.num_replays = 0
        self._slot = 0
        self._memory: dict[tuple[int, int], Slot] = {}
        for call in calls_of(program):
            call.run = self.run

    def before_forward(self, action: Action) -> None:
        self._slot = self.slots[action.chunk, action.microbatch]

    def run(self, call: RegionCall, inputs: Sequence[Tensor], held: Sequence[Any]) -> Sequence[Tensor]:
        """The outputs of a region for the microbatch that runs."""
        if not self.is_on or not torch.is_grad_enabled():
            return run_eagerly(call, inputs, held)
        key = call.index, self._slot
        if key not in self._memory:
            self._memory[key] = Slot(call, self.device)
        self.num_replays += 1
        return _Replay.apply(self._memory[key], len(inputs), *inputs, *held)

    @property
    def num_graphs(self) -> int:
        """A forward and a backward for each region and slot that ran."""
        return 2 * len(self._memory)

    @property
    def static_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._memory.values())


def calls_of(program: RankProgram) -> list[RegionCall]:
    """Every region of a rank, in the order of its stages."""
    attributes = (vars(stage.module) for stage in program.stages)
    return [value for named in attributes for value in named.values() if isinstance(value, RegionCall)]


class Slot:
    """The static memory of one region for one microbatch at a time. Owns: what the last forward left for backwards."""

    def __init__(self, call: RegionCall, device: torch.device) -> None:
        self.call = call
        self.inputs, self.outputs = _empty(call.inputs, device), _empty(call.outputs, device)
        self.of_inputs = _empty((b for b in call.inputs if b.requires_grad), device)
        self.of_outputs = _empty((b for b in call.outputs if b.requires_grad), device)
        self.of_later = _empty((call.inputs[i] for i in call.through), device)
        self._leaves: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._made: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self._all)

    @property
    def _all(self) -> tuple[Tensor, ...]:
        return (*self.inputs, *self.outputs, *self.of_inputs, *self.of_outputs, *self.of_later)

    def forward(self, given: Sequence[Tensor], held: Sequence[Any]) -> list[Tensor]:
        _copy(self.inputs, given)
        leaves = [
            static.data.requires_grad_(b.requires_grad) for static, b in zip(self.inputs, self.call.inputs, strict=True)
        ]
        with torch.enable_grad():
            made = self.call.module(*leaves, *held)
            through = [leaves[i].view_as(leaves[i]) for i in self.call.through]  # made last: its gradient comes first
        _copy(self.outputs, [value.detach() for value in made])
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._weights = [value for value in held if isinstance(value, Tensor) and value.requires_grad]
        made = [value for value, b in zip(made, self.call.outputs, strict=True) if b.requires_grad]
        self._made = [*made, *through]
        return [*(static.data for static in self.outputs), *(given[i].detach() for i in self.call.through)]

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of inputs and of weights, from those of the outputs that have one and of what goes through."""
        roots: list[tuple[Tensor, Tensor]] = []
        for value, static, given in zip(self._made, (*self.of_outputs, *self.of_later), gradients, strict=True):
            if given is not None:
                static.data.copy_(given)
            if given is not None and value.requires_grad:
                roots.append((value, static))
        leaves = [*self._leaves, *self._weights]
        seeds = [static for _, static in roots]
        values = [value for value, _ in roots]
        # retained: a graph can always be replayed, on whatever its memory then holds
        made = torch.autograd.grad(values, leaves, seeds, retain_graph=True, allow_unused=True) if roots else ()
        made = made or (None,) * len(leaves)
        found, of_weights = made[: len(self._leaves)], list(made[len(self._leaves) :])
        for static, gradient in zip(self.of_inputs, found, strict=True):
            static.data.zero_() if gradient is None else static.data.copy_(gradient)
        _poison((*self.inputs, *self.outputs, *self.of_outputs, *self.of_later))
        # whoever keeps them (a send, a leaf) must not see the next replay
        return [static.clone() for static in self.of_inputs], of_weights


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, count: int, *given: Any) -> Any:
        outputs = slot.forward(given[:count], given[count:])
        ctx.slot, ctx.weighs = slot, [isinstance(v, Tensor) and v.requires_grad for v in given[count:]]
        ctx.mark_non_differentiable(
            *(out for out, b in zip(outputs, slot.call.outputs, strict=False) if not b.requires_grad)
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call = ctx.slot.call
        wanted = [g for g, b in zip(grads, call.outputs, strict=False) if b.requires_grad]
        of_inputs, of_weights = map(iter, ctx.slot.backward([*wanted, *grads[len(call.outputs) :]]))
        found = [next(of_inputs) if b.requires_grad else None for b in call.inputs]
        return None, None, *found, *(next(of_weights) if weighs else None for weighs in ctx.weighs)


def _empty(values: Iterable[BoundaryPlan], device: torch.device) -> list[Tensor]:
    made = [torch.empty(b.shape, dtype=getattr(torch, b.dtype), device=device) for b in values]
    _poison(made)
    return made


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Unseen by autograd, as a graph's own memory is."""
    for target, value in zip(targets, values, strict=True):
        target.data.copy_(value)


def _poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
