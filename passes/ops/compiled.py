"""A run of plain ops as one call, so that a compiled function can replace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class CompiledCall:
    """One piece of a rank: its own graph, and the function that runs it. The runtime binds ``run``; unbound, it runs op
    by op.

    ``module(*inputs)`` gives the outputs as a tuple. ``inputs``: activations, parameters and buffers alike.
    ``counts_rows``: of each input, whether its first dim has as many rows as the routing sends here in this call.
    ``structure``: equal for pieces that compute the same, so that they can share one compiled function.
    ``again``: the backward of its block reruns it.
    """

    def __init__(
        self,
        index: int,
        module: fx.GraphModule,
        structure: str,
        where: str,
        *,
        counts_rows: Sequence[bool],
        again: bool = False,
    ) -> None:
        self.index, self.module, self.structure, self.where, self.again = index, module, structure, where, again
        self.counts_rows = tuple(counts_rows)
        self.run: Callable[[CompiledCall, Sequence[Any]], Sequence[Any]] | None = None

    def rows_of(self, inputs: Sequence[Any]) -> int | None:
        """The number of rows of this call; None if no input counts them."""
        found = {x.shape[0] for x, counts in zip(inputs, self.counts_rows, strict=True) if counts}
        assert len(found) < 2, f"{self} of {self.where} reads rows of several exchanges"
        return next(iter(found), None)

    def __repr__(self) -> str:
        return f"piece_{self.index}"


def run_piece(call: CompiledCall, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a piece, by whoever is bound to run it."""
    return call.module(*inputs) if call.run is None else call.run(call, inputs)
