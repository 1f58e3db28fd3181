"""The regions of a rank as the modules that Transformer Engine captures.

    module(*inputs) = region(*inputs, *held), with a gradient; without; None, …       held: parameters, buffers, handles

Memory for gradients of outputs is shared by the signature of those that have one, and taken with the gaps of the first
region that has it: so all modules give as many outputs, and those without a gradient come behind.

A replay runs no Python, so counts of collectives are taken at the capture, and added at each replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from passes.ops.random_state import Draw, RandomState
from passes.ops.region import RegionCall
from runtime.cuda_graphs.calls import axes_of

FORWARD, BACKWARD = "forward", "backward"


class RegionModule(nn.Module):
    """A region as a module.

    Owns: the counts of its collectives in one forward and in one backward, and the generators of its draws.
    """

    def __init__(self, call: RegionCall, held: Sequence[Any], num_outputs: int) -> None:
        super().__init__()
        self.call, self.held = call, list(held)
        self._places = sorted(range(len(call.outputs)), key=lambda place: not call.outputs[place].requires_grad)
        self._nothing = (None,) * (num_outputs - len(call.outputs))
        self.axes = axes_of(held)
        self.random = next((value for value in held if isinstance(value, RandomState)), None)
        self.generators: dict[Draw, torch.Generator] = {}
        self.counted: dict[str, list[Counter[Any]]] = {}
        for number, value in enumerate(held):
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"held_{number}", value)
            elif isinstance(value, Tensor):
                self.register_buffer(f"held_{number}", value, persistent=False)

    def forward(self, *inputs: Tensor) -> Sequence[Tensor | None]:
        made = self.call.module(*inputs, *self.held)
        given = [y if value.requires_grad else y.detach() for y, value in zip(made, self.call.outputs, strict=True)]
        return (*(given[place] for place in self._places), *self._nothing)

    def in_order(self, given: Sequence[Any]) -> list[Tensor]:
        """The region's outputs, from those of the module."""
        return [given[self._places.index(place)] for place in range(len(self._places))]

    def put_generators(self) -> None:
        """Set each generator to the first draw of the current microbatch."""
        if self.random is not None:
            self.random.put_all(self.generators)

    @property
    def capture_hooks(self) -> dict[str, dict[int, Callable[[nn.Module], None]]]:
        """Called around each forward and backward of the warm-up and of the capture, outside of the graph."""
        return {
            "forward_pre_hooks": {0: self._begin},
            "forward_hooks": {0: lambda _: self._end(FORWARD)},
            "backward_pre_hooks": {0: self._begin},
            "backward_hooks": {0: lambda _: self._end(BACKWARD)},
        }

    def count(self, phase: str) -> None:
        """As if the collectives of a forward, or of a backward, had run."""
        for counter, counts in zip(self._counters, self.counted.get(phase, ()), strict=False):
            counter.update(counts)

    def _begin(self, _: nn.Module) -> None:
        self._before = [counter.copy() for counter in self._counters]

    def _end(self, phase: str) -> None:
        self.counted[phase] = [now - before for now, before in zip(self._counters, self._before, strict=True)]

    @property
    def _counters(self) -> list[Counter[Any]]:
        return [counter for axis in self.axes for counter in (axis.counts, axis.bytes)]
