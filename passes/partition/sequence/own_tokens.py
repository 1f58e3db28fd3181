"""Values with different tokens on the ranks of cp: random numbers are drawn for them by each rank for itself."""

from __future__ import annotations

from torch import fx

from passes.program.ops.sequence import gather_sequence, local_rows, sum_over_ranks
from passes.program.program import Program

WHOLE_AGAIN = (gather_sequence, sum_over_ranks)


def names_of_own_tokens(program: Program) -> frozenset[str]:
    """The values made of ``local_rows``, up to the collectives; all others are the same on every rank of cp."""
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        is_made_of_them = node.target not in WHOLE_AGAIN and any(n in found for n in node.all_input_nodes)
        if node.op == "call_function" and (node.target is local_rows or is_made_of_them):
            found.add(node)
    return frozenset(node.name for node in found)
