"""A run of plain ops as one call, so that a compiled function can replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class CompiledCall:
    """One piece of a rank: its own graph, and the function that runs it. The runtime binds ``run``; unbound, it runs op
    by op.

    ``module(*inputs)`` gives the outputs as a tuple. ``inputs``: activations, parameters and buffers alike.
    ``structure``: equal for pieces that compute the same, so that they can share one compiled function.
    ``again``: the backward of its block reruns it.
    """

    def __init__(self, index: int, module: fx.GraphModule, structure: str, where: str, *, again: bool = False) -> None:
        self.index, self.module, self.structure, self.where, self.again = index, module, structure, where, again
        self.run: Callable[[CompiledCall, Sequence[Any]], Sequence[Any]] | None = None

    def __repr__(self) -> str:
        return f"piece_{self.index}"


def run_piece(call: CompiledCall, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a piece, by whoever is bound to run it."""
    return call.module(*inputs) if call.run is None else call.run(call, inputs)
