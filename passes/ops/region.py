"""A part of a stage that runs as one call, so that a CUDA graph can replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.program.stages import BoundaryPlan


class RegionCall:
    """One region of a rank: its own graph, and the function that runs it. The runtime binds ``run``; unbound, the graph
    runs directly.

    ``module(*inputs, *held)`` gives the outputs as a tuple. ``held``: parameters, buffers and handles, which are not
    copied. ``through``: places of the inputs that later readers get as outputs.
    """

    def __init__(
        self,
        index: int,
        module: fx.GraphModule,
        inputs: Sequence[BoundaryPlan],
        outputs: Sequence[BoundaryPlan],
        through: Sequence[int] = (),
    ) -> None:
        self.index, self.module, self.inputs, self.outputs = index, module, tuple(inputs), tuple(outputs)
        self.through = tuple(through)
        self.run: Callable[[RegionCall, Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None

    def __repr__(self) -> str:
        return f"region_{self.index}"


def run_region(call: RegionCall, inputs: Sequence[Any], held: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a region and the inputs that go through it, by whoever is bound to run it."""
    return run_eagerly(call, inputs, held) if call.run is None else call.run(call, inputs, held)


def run_eagerly(call: RegionCall, inputs: Sequence[Any], held: Sequence[Any]) -> Sequence[Any]:
    """As if there were no region."""
    return (*call.module(*inputs, *held), *(inputs[i] for i in call.through))
