"""The regions of a rank as the modules that Transformer Engine captures.

    module(*inputs) = region(*inputs, *held)       held: its parameters and buffers, and handles

A replay runs no Python, so what a collective counts is counted at the capture, and added at each replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from passes.ops.random_state import RandomState
from passes.ops.region import RegionCall
from runtime.cuda_graphs.calls import axes_of

FORWARD, BACKWARD = "forward", "backward"


class RegionModule(nn.Module):
    """A region as a module. Owns: what its collectives count in one forward and in one backward."""

    def __init__(self, call: RegionCall, held: Sequence[Any]) -> None:
        super().__init__()
        self.call, self.held = call, list(held)
        self.axes = axes_of(held)
        self.draws = any(isinstance(value, RandomState) for value in held)
        self.counted: dict[str, list[Counter[Any]]] = {}
        for number, value in enumerate(held):
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"held_{number}", value)
            elif isinstance(value, Tensor):
                self.register_buffer(f"held_{number}", value, persistent=False)

    def forward(self, *inputs: Tensor) -> Sequence[Tensor]:
        return self.call.module(*inputs, *self.held)

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
