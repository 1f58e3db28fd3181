"""Masks that are assumed to select every row, since Python asks how many rows they select.

    features.split(real.view(b, k).sum(1).tolist())          real = (images == 0).sum((1, 2, 3)) != n

Only the number of all rows can be the same in every batch. If a mask selects all rows of drawn batches, the forward is
exported again with its value known (passes.program.known_values), and a host checks each batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from passes.errors import Where
from passes.program.known_values import assume, node_of, value_of, with_writes
from passes.program.ops.aten import aten, is_mutable, is_pointwise
from passes.program.ops.groups import JOINS
from passes.program.program import Condition
from passes.program.walks import operands, walk
from planner.capture.graphs_equal import drawn
from planner.capture.selection.assumed import Assumptions, ExportAgain, Key, key_of_stack
from planner.capture.selection.conditions import that
from planner.capture.selection.places import row_dim

FULL = "this mask selects every row (Python counts the selected)"
MOST_OF_MASKS = 1 << 28  # of all values of one microbatch together: pixels
NUM_DRAWS = 2


class FullMasks:
    """Owns the masks that selected rows in one export, each with its place in the code and the last call before it."""

    def __init__(self, assumed: Assumptions, here: Callable[[], Where]) -> None:
        self._assumed, self._here = assumed, here
        self._seen: dict[fx.Node, tuple[Key, fx.Node]] = {}

    def prepared(self, mode: Any, func: Any, args: Any) -> Any:
        """Return the arguments of a call, in which a table beside selected rows is cut to as many rows."""
        masks = [i for i in args[1] if isinstance(i, Tensor)] if func is aten.index.Tensor else ()
        if len(masks) == 1 and masks[0].dtype == torch.bool:
            self._selects(masks[0], mode.tracer)
        joins = is_pointwise(func) or func in JOINS
        return _cut_to_selected(mode, args) if self._seen and joins and not is_mutable(func) else args

    def _selects(self, mask: Tensor, tracer: Any) -> None:
        """Note a mask of unknown values before it selects rows."""
        node = node_of(mask, tracer)
        if node is None or node in self._seen:
            return
        key, last = key_of_stack(), next(reversed(tracer.graph.nodes))
        self._seen[node] = key, last
        if key not in self._assumed.full:
            return
        with _without_modes():
            condition = _condition(node, last, tracer)
            if condition is not None:
                self._assumed.checks(self._here(), condition, FULL)
                assume(tracer, node, torch.ones(mask.shape, dtype=torch.bool))

    def asked(self, to_list: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``to_list``, but raise ExportAgain if its result is known once masks are assumed full."""

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


def _cut_to_selected(mode: Any, args: Any) -> Any:
    """Cut tables in features + x[mask]: PyTorch would compare both numbers of rows, and take the features'."""
    selected = next((x for x in pytree.tree_leaves(args) if row_dim(x) is not None), None)
    if selected is None:
        return args
    dim: Any = row_dim(selected)
    num, ndim = selected.shape[dim], selected.dim() - dim
    with mode:
        return pytree.tree_map(lambda x: x.narrow(0, 0, num) if _is_table(x, ndim) else x, args)


def _is_table(x: Any, ndim: int) -> bool:
    """Return whether rows of a known number lie along the first of ``ndim`` dims."""
    return isinstance(x, Tensor) and x.dim() == ndim and isinstance(x.shape[0], int) and x.shape[0] > 1


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


def _condition(mask: fx.Node, last: fx.Node, tracer: Any) -> Condition | None:
    """Return the condition that all of ``mask`` is true, with its values after the call ``last``."""
    needed = {n for n in walk([mask], with_writes) if n <= last}
    order = [n for n in tracer.graph.nodes if n in needed]
    return that(
        lambda graph, n: graph.call_function(aten.all.default, (n,)), mask, order, tracer.root, most=MOST_OF_MASKS
    )


def _is_full_when_drawn(mask: fx.Node, last: fx.Node, tracer: Any) -> bool:
    condition, holders = _condition(mask, last, tracer), tracer.graph.find_nodes(op="placeholder")
    if condition is None:
        return False
    generator, values = torch.Generator().manual_seed(0), [holders[int(at)].meta["val"] for at, _ in condition.inputs]
    draws = ([drawn(value, generator).to(value.dtype) for value in values] for _ in range(NUM_DRAWS))
    return all(bool(condition.graph.forward(*draw)[0]) for draw in draws)
