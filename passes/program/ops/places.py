"""The places of an integer value's elements in the batch tensor from which they were taken.

    labels                        [[a, b, c]]      places [[0, 1, 2]]
    pad(labels, [0, 1])[:, 1:]    [[b, c, fill]]   places [[1, 2, -1]]

Ops that move elements run on places as they run on values; an element that they fill in has no place, -1. Ops on single
elements, such as a clamp that turns an ignored label into a real one, leave places unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import getitem
from typing import Any, Protocol

import torch
from torch import fx

from passes.errors import PlanError
from passes.program.ops.aten import aten, is_pointwise, packet_of, position_of, shape_of
from passes.program.ops.groups import JOINS, MOVED, PADS, SPLITS, Ops
from passes.program.ops.sequence import local_rows
from passes.program.source_lines import where_of

NOWHERE = -1
MOVES = MOVED | SPLITS | PADS | JOINS | Ops("stack slice_scatter select_scatter repeat roll flip", [local_rows])


class Emit(Protocol):
    """Adds a call; returns a handle of its result."""

    def __call__(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PlaceWriter:
    """Writes the calls that compute places. Owns the calls that it has written, and the batch tensors that it reached.

    ``source``: the places of a batch tensor's own elements; None for any other placeholder or attribute. ``moves``:
    further ops that move elements, beside MOVES.
    """

    def __init__(self, source: Callable[[fx.Node], Any], emit: Emit, moves: Collection[Any] = ()) -> None:
        self.source, self.emit, self.moves = source, emit, MOVES | Ops("", moves)
        self.sources: dict[fx.Node, None] = {}
        self._written: dict[fx.Node, Any] = {}

    def places(self, node: fx.Node) -> Any:
        """Places of the elements of ``node``; None if none of them is of the batch.

        Raises PlanError at the line of a call that makes other integers of the batch's.
        """
        if node not in self._written:
            self._written[node] = self._of_call(node) if node.op == "call_function" else self._of_argument(node)
        return self._written[node]

    def _of_argument(self, node: fx.Node) -> Any:
        found = self.source(node)
        if found is not None:
            self.sources[node] = None
        return found

    def _of_call(self, node: fx.Node) -> Any:
        given = {n: self.places(n) for n in node.all_input_nodes if _is_integer(n)}
        held = {n: found for n, found in given.items() if found is not None}
        if not held:
            return None
        if is_pointwise(node.target) and len(held) == 1 and _is_integer(node):
            (value,) = held
            if shape_of(value) == shape_of(node):
                return held[value]
        if node.target in self.moves or node.target in (aten.where.self, getitem):
            return self._moved(node, held)
        raise PlanError(
            "the label of each target cannot be traced through this call",
            where=where_of(node),
            fix="pass the batch's labels to the loss: only shifted, sliced, padded or concatenated",
        )

    def _moved(self, node: fx.Node, held: dict[fx.Node, Any]) -> Any:
        args, kwargs = self._filled_with_nowhere(node)
        new_args, new_kwargs = fx.map_arg((args, kwargs), lambda n: held.get(n) or self._beside(node, n))  # pyright: ignore
        return self.emit(node, node.target, new_args, new_kwargs)

    def _beside(self, node: fx.Node, operand: fx.Node) -> Any:
        """The places of an operand that holds none of the batch: NOWHERE if it is joined with others; else the operand
        itself.
        """
        others = (aten.stack, aten.slice_scatter, aten.select_scatter, aten.where)
        is_joined = node.target in JOINS or packet_of(node.target) in others
        if not is_joined or not _is_integer(operand):
            return operand
        return self.emit(operand, aten.full_like.default, (operand, NOWHERE), {})

    def _filled_with_nowhere(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if node.target not in PADS:
            return node.args, dict(node.kwargs)
        place, kwargs = position_of(node.target, "value"), {k: v for k, v in node.kwargs.items() if k != "value"}
        args = (*node.args[:place], NOWHERE) if len(node.args) >= place else node.args
        return args, kwargs if len(node.args) >= place else {**kwargs, "value": NOWHERE}


def _is_integer(node: fx.Node) -> bool:
    """Also a list of integer tensors, as a split makes it."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return bool(tensors) and not any(
        v.dtype.is_floating_point or v.dtype.is_complex or v.dtype == torch.bool for v in tensors
    )
