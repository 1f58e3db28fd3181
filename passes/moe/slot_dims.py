"""A dim of slots, or of experts, as calls carry it on: each index of it is computed by itself.

x[E, C, d] @ W[E, d, h] + bias[E, 1, h]      C stays dim 1, E dim 0: both are batch to all that lies among experts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from passes.moe.refusals import Refusal
from passes.moe.rows import keeps_rows
from passes.moe.ties import ties

MIXED = "the result of one slot of one expert depends on others"


def followed(start: Mapping[fx.Node, int], calls: Collection[fx.Node], refusal: Refusal) -> dict[fx.Node, int]:
    """The dims that count the same as those of ``start``, for all ``calls`` and operands that have one.

    Raises the error of ``refusal`` if a call acts along that dim, or if two dims of a value count the same.
    """
    known, work = dict(start), list(start)
    while work:
        node = work.pop()
        for call in (n for n in (node, *node.users) if n in calls):
            for other, dim in beside(call, node, known[node]):
                if other not in known:
                    work.append(other)
                if known.setdefault(other, dim) != dim:
                    raise refusal(call, "two dims of a value count its experts, or its slots")
    for node in calls:
        if node in known and node.op == "call_function":
            _check_apart(node, known, refusal)
    return known


def _check_apart(node: fx.Node, known: Mapping[fx.Node, int], refusal: Refusal) -> None:
    """Raise if a call maps a dim of an operand to another than its own, or acts along it."""
    for value in node.all_input_nodes:
        if value in known and (node, known[node]) not in beside(node, value, known[value]):
            raise refusal(node, MIXED)
    if not keeps_rows(node, known):
        raise refusal(node, MIXED)


def beside(call: fx.Node, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """(value, dim) of ``call`` and its operands that count the same as ``dim`` of ``node``."""
    found = [tie for tie in ties(call) if (node, dim) in tie]
    return [(n, d) for tie in found for n, d in tie if n is not node]
