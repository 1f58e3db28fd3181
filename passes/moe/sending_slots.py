"""Calls that send slots to their experts and back, and the counts of filled slots.

counts = how many tokens chose each expert        given once a layer, by the first call that sends
limit  = C, if an expert was shown to fill as many of its C slots as tokens chose it, and no more
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.building import Builder
from passes.moe.domain import Domain
from passes.moe.layers import Dispatch, ExpertLayer
from passes.moe.refusals import refusal_of
from passes.moe.routing import Routing
from passes.program.ops.aten import shape_of
from passes.program.program import Program

FIX = "compute each slot with only its expert, with separate dims for experts and slots"


class Sending:
    """Of one layer. Owns ``limit``: known once something was sent."""

    def __init__(self, program: Program, layer: ExpertLayer) -> None:
        self.graph, self.layer = program.graph.graph, layer
        self.chosen = [program.node(name) for name in layer.chosen]
        self.weighing = [program.node(name) for name in layer.probs]
        self.routing = Routing(layer.num_experts, self.chosen)
        self.refusal = refusal_of(layer, FIX)
        self.limit = 0
        self._is_told = False

    def send(self, value: fx.Node, reader: fx.Node, experts: int, slots: int) -> fx.Node:
        """Its slots on the ranks of their experts. Stands before ``reader``."""
        build, given = Builder(self.graph, reader, value), ()
        if not self._is_told:
            self._is_told = True
            self.limit, groups = self._filled(value, shape_of(value)[slots])
            given = (self._counts(build, groups),)
        domain, val, grad = Domain(experts=experts, slots=slots), value.meta["val"], value.meta["grad"]
        return build.call(exchange.send_slots, value, experts, slots, *given, val=val, domain=domain, grad=grad)

    def give_back(self, node: fx.Node, inside: Collection[fx.Node], experts: int, slots: int) -> fx.Node:
        """The results of ``node``, returned to the slots' own ranks, for all readers that are not ``inside``."""
        users = [u for u in node.users if u not in inside]
        build = Builder(self.graph, node.next, node)
        back = build.call(exchange.return_slots, node, experts, slots, val=node.meta["val"])
        for user in users:
            user.replace_input_with(node, back)
        return back

    def _counts(self, build: Builder, groups: int) -> fx.Node:
        size = self.layer.num_experts
        val = torch.empty((groups, size), dtype=torch.int64, device="meta")
        if self.layer.dispatch is Dispatch.TAKEN:
            return build.call(exchange.count_taken, size, *self.chosen, val=val)
        return build.call(exchange.count_by_group, size, groups, *self.chosen, val=val)

    def _filled(self, value: fx.Node, size: int) -> tuple[int, int]:
        """(slots of an expert for a group of tokens, number of groups), if as many slots are filled as tokens chose the
        expert; (0, 1) if that is not shown. ``size``: the slots of an expert in ``value``, maybe of several groups.
        """
        nodes = () if self.layer.dispatch is Dispatch.TAKEN else (*self.weighing, value)
        for node in nodes:
            for slots in sorted({n for n in (size, *shape_of(node)) if n and size % n == 0}, reverse=True):
                groups = self.routing.groups_filled(node, slots)
                if groups and (slots == size or slots * groups == size):
                    return slots, groups
        return 0, 1
