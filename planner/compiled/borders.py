"""The ends of a run of ops that are compiled together: the ops that are not compiled, each with its reason.

products             one kernel already, and their backward is ours
attention, lookups   likewise; a loss that overwrites its logits
forms of their own   ops that communicate once they are sharded
random draws         so that masks are the same as without compiling
experts' domain      all but ops on one row at a time: a compiled function takes any number of rows
complex numbers, sizes that follow values, Python of the user
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.moe.domain import counts_rows, domain_of
from passes.program.ops.aten import aten, is_mutable, is_pointwise, is_random, packet_of, tensors_of
from passes.program.ops.host_stops import reads_on_host
from passes.program.ops.own_backward import OwnBackward
from passes.rules.flops import has_flops
from planner.compiled.homes import is_free
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
        if domain.number >= 0 and self._decisions.mesh.ep > 1:
            return "each rank of ep runs it for experts of its own"
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


def is_worth_telling(reason: str) -> bool:
    """Whether the reason is news to a user: not for products and collectives, which separate pieces by design."""
    return reason not in ("", OURS)
