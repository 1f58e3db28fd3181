"""The units of weights: parameters that the same blocks read share a bucket, which is gathered, and scattered, at once.

unit     parameters with the same readers: one block; what stands before, between or after blocks; several of these
         (a tied weight, a layer applied twice)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

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
    """Op → its block, or the last block before it."""
    block_of, last, found = decisions.blocks.block_of(), -1, dict[str, Home]()
    for node in decisions.program.graph.graph.nodes:
        if node.op == "call_function":
            own = block_of.get(node.name)
            last = last if own is None else max(last, own)
            found[node.name] = (last, True) if own is None else (own, False)
    return found


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if user.op == "call_function")
