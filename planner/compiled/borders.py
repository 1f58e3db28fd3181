"""The ends of a run of ops that are compiled together: the ops that are not compiled, each with its reason.

products             one kernel already, and their backward is ours
attention, lookups   likewise; a loss that overwrites its logits
forms of their own   ops that communicate once they are sharded
random draws         so that masks are the same as without compiling
experts' domain      the number of rows depends on the routing
complex numbers, sizes that follow values, Python of the user
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.moe.domain import axis_of, domain_of
from passes.partition.options.forms import Form
from passes.program.ops.aten import aten, is_mutable, is_random, packet_of, tensors_of
from passes.program.ops.host_stops import reads_on_host
from passes.program.ops.overwritten import loses_logits
from passes.program.ops.own_backward import OwnBackward
from passes.rules.flops import has_flops
from planner.decisions import Decisions

_MEET = {Form.VOCABULARY, Form.CLASSES, Form.OVER_RANKS, Form.PICKED, Form.SHARED_KEYS}

PRODUCT = "a separate kernel"
MEETING = "it contains a collective"
_BY_DESIGN = {PRODUCT, MEETING}


class Borders:
    """Says of each call of a program whether a piece ends at it."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions

    def reason(self, node: fx.Node) -> str:
        """Why a call is no part of a piece; empty if it is plain."""
        target: Any = node.target
        if node.target is operator.getitem:
            return self.reason(node.all_input_nodes[0])
        if isinstance(target, OwnBackward):
            return "a custom autograd.Function, which may run any Python code"
        if domain_of(node) is not None:
            return "the number of rows per expert depends on the routing"
        if target is aten.cross_entropy_loss.default and loses_logits(node):
            return PRODUCT
        is_kernel = has_flops(node) or packet_of(target) is aten.embedding
        if not isinstance(target, torch._ops.OpOverload) or (is_kernel and target.namespace == "aten"):
            return "a random draw" if is_random(node) else PRODUCT
        return self._of_op(node, target)

    def _of_op(self, node: fx.Node, target: Any) -> str:
        mesh, axis = self._decisions.mesh, axis_of(node)
        if is_random(node):
            return "a random draw"
        if target.namespace != "aten":
            return f"an op of {target.namespace}, not a torch op"
        if getattr(mesh, axis) > 1 and self._decisions.placements.options[node.name].form in _MEET:
            return MEETING
        if reads_on_host(target, node.args, lambda value: value.meta["val"]):
            return "its size is data-dependent"
        if is_mutable(target):
            return "it writes into an argument"
        values = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
        return "complex numbers" if any(t.is_complex() for t in values) else ""


def is_worth_telling(reason: str) -> bool:
    """Whether the reason is news to a user: not for products and collectives, which separate pieces by design."""
    return bool(reason) and reason not in _BY_DESIGN
