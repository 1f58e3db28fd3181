"""What one capture shows of the sequences of its batch: found when it is asked for, and once."""

from collections.abc import Collection
from functools import cached_property

from torch import fx

from passes.partition.batch import mixing
from passes.partition.batch.one_sequence import OneSequence
from passes.partition.batch.orders import Runs, batch_size
from passes.partition.batch.restored_orders import RestoredOrder, restored_orders
from passes.program.ops.own_backward import OwnBackward
from passes.program.program import Program


class Sequences:
    """Owns the facts of ``program`` before anything is rewritten. ``on_batch``: nodes made of the batch's values."""

    def __init__(self, program: Program) -> None:
        self.program, self.on_batch, self.size = program, mixing.follows_batch(program), batch_size(program)
        self._along: dict[frozenset[fx.Node], list[fx.Node]] = {}

    @cached_property
    def orders(self) -> list[RestoredOrder]:
        """Of rows that are sorted by expert and come back in order: they keep sequences apart."""
        return restored_orders(self.program.graph.graph, self.on_batch)

    @cached_property
    def runs(self) -> Runs:
        """The dims that hold the batch."""
        return mixing.batch_runs(self.program, self.on_batch, self.orders)

    def computed_along(self, loss: Collection[fx.Node]) -> list[fx.Node]:
        """Values before ``loss`` that may mix sequences."""
        key = frozenset(loss)
        if key not in self._along:
            orders = [o for o in self.orders if self.size == 1 or all(self.runs[node] is not None for node in o.back)]
            apart = {node for order in orders for node in (*order.inside, *order.back)}
            found = mixing.computed_along(self.program, self.on_batch, loss)
            self._along[key] = [node for node in found if node not in apart]
        return self._along[key]

    def may_be_mixed(self, inner: Collection[fx.Node]) -> bool:
        """Whether one of ``inner`` may mix the sequences; more of them would show it."""
        return self._may_mix_one(inner) if self.size == 1 else self._may_mix_several(inner)

    def _may_mix_one(self, inner: Collection[fx.Node]) -> bool:
        one = OneSequence(self.program, self.on_batch, self.orders)
        unknown = [
            n for n in inner if isinstance(n.target, OwnBackward) or not any(map(one.places.get, n.all_input_nodes))
        ]
        return (
            any(mixing.may_mix(node, self.on_batch) for node in unknown)
            or any(mixing.may_repeat_batch(node) for node in inner)
            or any(map(one.may_mix, inner))
        )

    def _may_mix_several(self, inner: Collection[fx.Node]) -> bool:
        flow = mixing.dims_of(self.runs)
        asked = {node for node in inner if mixing.may_mix(node, self.on_batch)}
        for node in inner:
            known = mixing.mixes_along_a_dim(node) and all(flow.get(v) is not None for v in node.all_input_nodes)
            if (known or node in asked) and mixing.may_run_along(node, flow):
                return True
        return False
