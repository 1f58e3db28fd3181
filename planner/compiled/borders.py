"""The ends of a run of ops that are compiled together: the ops that are not compiled, each with its reason.

products             one kernel already, and their backward is ours
attention, lookups   likewise; a loss that overwrites its logits
forms of their own   ops that communicate once they are sharded
random draws         so that masks are the same as without compiling
experts' domain      all but ops on one row at a time: a compiled function takes any number of rows
complex numbers, sizes that follow values, Python of the user

The home of a call: its region and block. No piece spans two homes, and no path enters one twice.

region   the captured part of a block: a piece is inside of its graph or outside
block    the recomputed block, and whether its backward reruns the call: a piece is rerun entirely or not at all
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.moe.domain import counts_rows, domain_of
from passes.pieces import Piece, Region
from passes.program.ops.aten import (
    aten,
    is_mutable,
    is_pointwise,
    is_random,
    is_view,
    packet_of,
    reads_on_host,
    tensors_of,
)
from passes.program.ops.groups import RESHAPES
from passes.program.ops.own_backward import OwnBackward
from passes.rules.flops import has_flops
from planner.decisions import Decisions

OURS = "a separate kernel, or a collective"


class Borders:
    """Says of each call of a program whether a piece ends at it."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions

    def reason(self, node: fx.Node) -> str:
        """Why a call of a lowered stage is no part of a piece; empty if it is plain."""
        if node.target is operator.getitem:
            return self.reason(node.all_input_nodes[0])
        if "change" in node.meta:
            return OURS
        if isinstance(node.target, OwnBackward):
            return "a custom autograd.Function, which may run any Python code"
        if is_random(node) or is_random(self._decisions.program.node(node.meta["origin"])):
            return "a random draw"
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return OURS
        return self._of_experts(node) or self._of_op(node, target)

    def _of_experts(self, node: fx.Node) -> str:
        domain = domain_of(node)
        if domain is None:
            return ""
        return "" if _is_of_single_rows(node) else "the number of rows per expert depends on the routing"

    def _of_op(self, node: fx.Node, target: Any) -> str:
        if target.namespace != "aten":
            return f"an op of {target.namespace}, not a torch op"
        if has_flops(node) or packet_of(target) is aten.embedding:
            return OURS
        if reads_on_host(target, node.args, lambda value: value.meta["val"]):
            return "its size is data-dependent"
        if is_mutable(target):
            return "it writes into an argument"
        values = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
        return "complex numbers" if any(t.is_complex() for t in values) else ""


def _is_of_single_rows(node: fx.Node) -> bool:
    """Whether a call in the experts' domain computes each row from that row alone, and from values outside of it."""
    values = (node, *(v for v in node.all_input_nodes if domain_of(v) is not None))
    return all(map(counts_rows, values)) and (is_pointwise(node.target) or is_free(node))


@dataclass(frozen=True, slots=True)
class Home:
    """``region`` and ``block`` by index, None outside of all; ``again``: the block's backward runs it once more."""

    region: int | None = None
    block: int | None = None
    again: bool = False


OUTSIDE = Home()


class RegionHomes:
    """Of one stage. Owns: captured name → its region, its recomputed block, and the calls that its backward reruns."""

    def __init__(self, stage: int, regions: Sequence[Region], recomputed: Sequence[Piece]) -> None:
        mine = [region for region in regions if region.stage == stage and not region.refused]
        self._region = {name: region.index for region in mine for name in sorted(region.nodes)}
        blocks = [piece for piece in recomputed if piece.stage == stage]
        self._block = {name: piece.index for piece in blocks for name in sorted(piece.nodes)}
        self._again = {call.name for piece in blocks for call in piece.again if call.changed is None}
        self.num_regions = len(mine)

    def of_calls(self, calls: Sequence[fx.Node]) -> dict[fx.Node, Home]:
        """``calls`` of the lowered stage in their order. A view is rerun if its base is."""
        found: dict[fx.Node, Home] = {}
        for node in calls:
            name = node.meta["origin"]
            region, block = self._region.get(name), self._block.get(name)
            source = found.get(node.all_input_nodes[0]) if is_free(node) and node.all_input_nodes else None
            again = source.again if source is not None and source.block == block else name in self._again
            found[node] = Home(region, block, again)
        return found


def is_free(node: fx.Node) -> bool:
    """Whether a call makes no values of its own."""
    return node.target in RESHAPES or is_view(node)
