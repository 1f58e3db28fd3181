"""Terms of a loss that are no sum over the batch, such as a product of two means: exact by sums over the global batch.

    mean(a) · mean(b)   →   over_data(mean(a) / n) · over_data(mean(b) / n)     each microbatch has all of it, takes 1/n

The parts that add up over the batch are summed over all microbatches: values made of these sums are everywhere those of
one process over the global batch. With one microbatch for each dp rank that is a sum over ranks; with several in turn,
forwards of their own count the sums first (passes.ops.global_sums).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from passes.partition.loss.kinds import LOOSE, ROWS, SHARE, UNKNOWN, WHOLE, Kind
from passes.program.ops.aten import aten, named, packet_of
from passes.program.ops.over_data import over_data

Emit = Callable[..., fx.Node]


class Together:
    """Owns the values summed over the ranks so far. ``share`` writes a value with the global one as its sum over
    microbatches.
    """

    def __init__(self, kinds: Mapping[fx.Node, Kind], emit: Emit, share: Callable[[fx.Node], fx.Node]) -> None:
        self.kinds, self.emit, self.share = kinds, emit, share
        self.made: dict[fx.Node, fx.Node | None] = {}

    def whole(self, node: fx.Node) -> fx.Node | None:
        """``node`` as one process has it on the global batch; None if it is made of single rows."""
        if node not in self.made:
            self.made[node] = self._whole(node)
        return self.made[node]

    def _whole(self, node: fx.Node) -> fx.Node | None:
        kind = self.kinds[node].name
        if kind == WHOLE:
            return node
        if kind in (SHARE, LOOSE):
            return self.emit(node, over_data, [self.share(node)]) if kind == SHARE else None
        if kind == UNKNOWN and self._counts_rows(node):
            return self.emit(node, over_data, [node])
        if kind != UNKNOWN or node.op != "call_function":
            return None
        given = {n: self.whole(n) for n in node.all_input_nodes}
        if None in given.values():
            return None
        args: Any = fx.map_arg(node.args, lambda n: given[n])
        return self.emit(node, node.target, list(args), dict(fx.map_arg(node.kwargs, lambda n: given[n])))

    def _counts_rows(self, node: fx.Node) -> bool:
        """A histogram of rows in bins that do not follow the rows: counts add up."""
        if packet_of(node.target) is not aten.histc or self.kinds[node.all_input_nodes[0]].name != ROWS:
            return False
        given = named(node)
        return given["min"] < given["max"]
