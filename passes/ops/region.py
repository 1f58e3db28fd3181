"""Parts of a stage that run as one call: a region, which a CUDA graph can replace, and a run of plain ops, which a
compiled function can.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.program.program import BoundaryPlan


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
    """Return the outputs of a region and the inputs that go through it, by whoever is bound to run it."""
    return run_eagerly(call, inputs, held) if call.run is None else call.run(call, inputs, held)


def run_eagerly(call: RegionCall, inputs: Sequence[Any], held: Sequence[Any]) -> Sequence[Any]:
    """Run the graph as if there were no region."""
    return (*call.module(*inputs, *held), *(inputs[i] for i in call.through))


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
        """Return the number of rows of this call; None if no input counts them."""
        found = {x.shape[0] for x, counts in zip(inputs, self.counts_rows, strict=True) if counts}
        assert len(found) < 2, f"{self} of {self.where} reads rows of several exchanges"
        return next(iter(found), None)

    def __repr__(self) -> str:
        return f"piece_{self.index}"


def run_piece(call: CompiledCall, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of a piece, by whoever is bound to run it."""
    return call.module(*inputs) if call.run is None else call.run(call, inputs)
