"""A mask that selects every row, where Python asks how many rows it selects: assumed.

    real = (images == 0).sum((1, 2, 3)) != n                    no image is padding
    features = self.encode(images[real])
    features.split(real.view(b, k).sum(1).tolist())             the question

No other number of rows is that of every batch. If the mask selects all rows of drawn batches, the forward is exported
again with its value known (passes.program.known_values), and a host checks each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from passes.errors import Where
from passes.program.known_values import assume, node_of, value_of, with_writes
from passes.program.ops.aten import aten
from passes.program.program import Condition
from passes.program.walks import operands, walk
from planner.capture.selection.assumed import Assumptions, ExportAgain, Key, key_of_stack
from planner.capture.selection.conditions import that

WHAT = "this mask selects every row (Python counts the selected)"
MOST_ELEMENTS = 1 << 28  # of all values of one microbatch together: pixels
NUM_DRAWS = 2


class FullMasks:
    """Owns the masks that selected rows in one export, each with the place in the code and the last call before.

    ``graph``: that of the export, once a mask has selected rows.
    """

    def __init__(self, assumed: Assumptions, here: Callable[[], Where]) -> None:
        self._assumed, self._here = assumed, here
        self._seen: dict[fx.Node, tuple[Key, fx.Node]] = {}
        self.graph: fx.Graph | None = None

    def selects(self, mask: Tensor, tracer: Any) -> None:
        """Called before a mask of unknown values selects rows."""
        node, self.graph = node_of(mask, tracer), tracer.graph
        if node is None or node in self._seen:
            return
        key, last = key_of_stack(), next(reversed(tracer.graph.nodes))
        self._seen[node] = key, last
        if key not in self._assumed.full:
            return
        with _without_modes():
            condition = _condition(node, last, tracer)
            if condition is not None:
                self._assumed.checks(self._here(), condition, WHAT)
                assume(tracer, node, torch.ones(mask.shape, dtype=torch.bool))

    def asked(self, to_list: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``to_list``, the numbers of a tensor; raises ExportAgain if they are known once masks are assumed full."""

        def asked(tensor: Tensor) -> Any:
            mode = proxy_tensor.get_proxy_mode()
            node = None if mode is None else node_of(tensor, mode.tracer)
            if mode is not None and node is not None:
                with _without_modes():
                    self._ask(node, mode.tracer)
            return to_list(tensor)

        return asked

    def _ask(self, node: fx.Node, tracer: Any) -> None:
        masks = [n for n in walk([node], operands, stop=self._seen.__contains__) if n in self._seen]
        keys = {self._seen[n][0] for n in masks} - self._assumed.full
        full = {n: torch.ones(n.meta["val"].shape, dtype=torch.bool) for n in masks}
        if not keys or value_of(node, tracer.root, full) is None:
            return
        if all(_is_full_when_drawn(n, self._seen[n][1], tracer) for n in masks):
            self._assumed.full |= keys
            raise ExportAgain("a mask is assumed to select every row", where=self._here(), fix="")


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


def _condition(mask: fx.Node, last: fx.Node, tracer: Any) -> Condition | None:
    """That all of ``mask`` is true, with its values after the call ``last``."""
    needed = {n for n in walk([mask], with_writes) if n <= last}
    order = [n for n in tracer.graph.nodes if n in needed]
    return that(
        lambda graph, n: graph.call_function(aten.all.default, (n,)), mask, order, tracer.root, most=MOST_ELEMENTS
    )


def _is_full_when_drawn(mask: fx.Node, last: fx.Node, tracer: Any) -> bool:
    condition, holders = _condition(mask, last, tracer), tracer.graph.find_nodes(op="placeholder")
    if condition is None:
        return False
    values = [holders[int(position)].meta["val"] for position, _ in condition.inputs]
    generator = torch.Generator().manual_seed(0)
    draws = [[_drawn(value, generator) for value in values] for _ in range(NUM_DRAWS)]
    return all(bool(condition.graph.forward(*drawn)[0]) for drawn in draws)


def _drawn(value: Tensor, generator: torch.Generator) -> Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    return torch.randint(2, value.shape, generator=generator).to(value.dtype)
