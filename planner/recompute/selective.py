"""Which memories a selective piece keeps: the fewest bytes from which all freed memory is cheap to recompute.

A minimum cut between values that are expensive to compute and values that the backward reads:

    dear → m        m is made by a product with weights, an exchange, or an op too dear for its bytes
    m in → m out    the bytes of m: to cut here is to keep m
    r out → m in    a cheap call makes m of r
    m out → end     autograd keeps m for the backward

(Jain et al. 2020, "Checkmate", asks the same of memory under a budget; here the price is set by a ratio instead.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.recompute.memories import Memories
from planner.saved.trace import Call

if TYPE_CHECKING:
    import networkx as nx

# Operations per freed byte. A linear of 768 features costs 384 in float32, attention scores of heads of 64
# cost 32, and an op that reads one value and writes one 16 (the bytes that it moves, at
# passes.rules.flops.FLOPS_PER_BYTE).
MOST_PER_BYTE = 128.0
# Likewise for the internal tensors of an op: scores of attention cost 20, the mask of a dropout, drawn one by one, 64.
MOST_PER_BYTE_INSIDE = 32.0
_SOURCE, _SINK = -1, -2


def kept_memories(memories: Memories, insides: list[Call]) -> set[int]:
    """Memories made in the piece, and given to it, that are kept. ``insides``: calls that run again in any case."""
    import networkx as nx  # here, not above: only this needs it

    graph = _graph(memories, insides)
    if not graph.has_node(_SOURCE) or not graph.has_node(_SINK):
        return set()
    _, (reached, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return {memory for memory in memories.maker if 2 * memory in reached and 2 * memory + 1 not in reached}


def _graph(memories: Memories, insides: list[Call]) -> nx.DiGraph:
    import networkx as nx

    graph = nx.DiGraph()
    insides = [call for call in insides if not memories.is_of_shape_alone(call)]
    runs_anyway = {id(call) for call in insides}
    for memory in memories.given:
        graph.add_edge(_SOURCE, 2 * memory)
        graph.add_edge(2 * memory, 2 * memory + 1, capacity=memories.costs_to_keep(memory))
    for call in memories.calls:
        dear = id(call) not in runs_anyway and is_dear(memories, call)
        if dear:  # a sum over ranks too, in the memory of its addend
            graph.add_edges_from((_SOURCE, 2 * memory) for memory in memories.written(call))
        for memory in memories.made(call):
            graph.add_edge(2 * memory, 2 * memory + 1, capacity=memories.costs_to_keep(memory))
            if memory in memories.seen:
                graph.add_edge(_SOURCE, 2 * memory)
            elif not dear:
                graph.add_edges_from((2 * read + 1, 2 * memory) for read in call.reads)
    for memory in memories.saved:
        graph.add_edge(2 * memory + 1, _SINK)
    for call in insides:
        graph.add_edges_from((2 * read + 1, _SINK) for read in call.reads)
    return graph


def is_dear(memories: Memories, call: Call) -> bool:
    """Whether a call is not worth its bytes."""
    if memories.runs_once(call) or memories.exchanges(call) or _is_product_with_weights(memories, call):
        return True
    size = sum(map(memories.bytes, memories.made(call)))
    return memories.flops(call) > MOST_PER_BYTE * size


def worth_inside(memories: Memories, call: Call) -> bool:
    """Whether the insides of a call are worth running it again."""
    if memories.runs_once(call) or memories.exchanges(call) or _is_product_with_weights(memories, call):
        return False
    return memories.cost(call) <= MOST_PER_BYTE_INSIDE * sum(call.hidden)


def _is_product_with_weights(memories: Memories, call: Call) -> bool:
    return bool(memories.flops(call)) and memories.reads_weights(call)
