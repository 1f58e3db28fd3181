"""The units of weights: parameters that the same blocks read share a bucket, which is gathered, and scattered, at once.

unit     parameters with the same readers: one block; what stands before, between or after blocks; several of these
         (a tied weight, a layer applied twice)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.moe.domain import is_of_one
from planner.decisions import Decisions

Home = tuple[int, bool]  # (index of a block, whether it is behind that block and in none)


def units_of(decisions: Decisions) -> dict[str, tuple[Home, ...]]:
    """Dotted name of each parameter → the places of its readers, in their order; the same for all of one unit."""
    homes, program = homes_of_ops(decisions), decisions.program
    found: dict[str, set[Home]] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.parameters:
            found.setdefault(program.parameters[node.name], set()).update(homes[u.name] for u in _calls(node))
    return {name: tuple(sorted(of_name)) for name, of_name in found.items()}


def homes_of_ops(decisions: Decisions) -> dict[str, Home]:
    """Op → its block, or the last block before it. Of experts in a loop a rank has only some: they are of the place
    where the loop begins, so that all ranks have the same places."""
    block_of, last, found = decisions.blocks.block_of(), -1, dict[str, Home]()
    here: Home = (last, True)
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        own = block_of.get(node.name)
        if not is_of_one(node):
            last = last if own is None else max(last, own)
            here = (last, True) if own is None else (own, False)
        found[node.name] = here
    return found


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.op == "call_function")
