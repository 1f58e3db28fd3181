"""Calls that no CUDA graph captures: they wait for the device, have no fixed shape, or run Python of their own.

For experts: the host waits for the exchange of counts, and all ops up to the combine have a number of rows that depends
on it. Also a part that cannot run as one call: one that a stage boundary splits, or one that reads values made from its
own outputs outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.moe.ties import is_grouped
from passes.program.ops.host_stops import reads_on_host
from passes.program.ops.own_backward import OwnBackward
from planner.decisions import Decisions

Refusal = tuple[fx.Node, str]  # the first call that is in the way, and why
_ROUTED = {exchange.meet, *exchange.MOVING, *exchange.OF_TOKENS}


def refusal(nodes: Sequence[fx.Node], stage: int, decisions: Decisions) -> Refusal | None:
    """Why no graph captures a part of a block; None if one does."""
    for found in uncapturable(nodes):
        return found
    for node in nodes:
        if decisions.stages.stage_of[node.name] != stage:
            return node, f"{node.target} runs on a later stage than the start of the block"
    returning = _comes_back(nodes)
    if returning is None:
        return None
    return returning, f"{returning.target} reads a value that was computed outside from a result of the region"


def uncapturable(nodes: Iterable[fx.Node]) -> Iterator[Refusal]:
    """The calls that no graph captures, wherever they stand."""
    for node in nodes:
        if isinstance(node.target, OwnBackward):
            yield node, f"{node.target} is a custom autograd.Function, which may run any Python code"
        elif _is_routed(node):
            yield node, "rows are dispatched to the ranks of their experts, and the host waits for the counts"
        elif is_grouped(node) and node.target.namespace != "aten":  # pyright: ignore
            yield node, f"{node.target} reads the row counts of experts on the host"
        elif reads_on_host(node.target, node.args, lambda value: value.meta["val"]):
            yield node, f"the output shape of {node.target} is data-dependent: the host would wait for it"


def _is_routed(node: fx.Node) -> bool:
    domain = domain_of(node)
    return node.target in _ROUTED or (domain is not None and domain.rows >= 0)


def _comes_back(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """A node of the region that reads a value made outside from the region's values."""
    inside, outside = set(nodes), set[fx.Node]()
    node, last = nodes[0], nodes[-1]
    while node is not last.next:
        reads_outside = any(n in outside for n in node.all_input_nodes)
        if node in inside:
            if reads_outside:
                return node
        elif reads_outside or any(n in inside for n in node.all_input_nodes):
            outside.add(node)
        node = node.next
    return None
