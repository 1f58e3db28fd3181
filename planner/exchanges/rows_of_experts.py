"""The collectives' rows of rows that go to experts: over ep each to its expert's rank, over etp to all holders of a
part.

``bytes``: over ep those of this rank's own rows, which it sends and gets back for any routing; over etp, on which a
rank passes on received rows, as if every expert got equally many. An axis of one rank exchanges nothing. The number of
slots does not depend on the routing, over both axes: E · C / tp · hidden, with padding if tp does not divide C.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from torch import fx

from passes.blocks.places import Places
from passes.moe import exchange
from passes.moe.domain import share_of_slots
from passes.program.ops.aten import shape_of
from passes.types.collectives import CollectivePlan
from passes.types.conversions import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from planner.decisions import Decisions
from planner.mesh import Mesh


def exchanges_of(decisions: Decisions) -> list[fx.Node]:
    """The calls that exchange counts, dispatch rows and combine them, in the graph's order."""
    nodes = decisions.program.graph.graph.find_nodes
    return sorted(n for target in exchange.EXCHANGES for n in nodes(op="call_function", target=target))


def exchange_rows(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of one of them, in both directions."""
    mesh, place = decisions.mesh, (places.text(node), places.block(node))

    def row(kind: str, axis: str, phase: str, size: int) -> CollectivePlan:
        return CollectivePlan(kind, axis, phase, place[0], size, 1, "microbatch", stage, place[1])

    if node.target is exchange.meet:
        counts = shape_of(node)[0] * node.meta["val"].element_size()
        if mesh.ep > 1:
            yield row(ALL_TO_ALL, "ep", "forward", counts)
        if mesh.etp > 1:
            yield row(ALL_GATHER, "etp", "forward", counts // mesh.ep * mesh.etp)
        return
    size = sent_bytes(node, mesh)
    for phase in ("forward", "backward") if node.meta["grad"] else ("forward",):
        if mesh.ep > 1:
            yield row(ALL_TO_ALL, "ep", phase, size)
        if mesh.etp > 1:
            yield row(_over_etp(node, phase), "etp", phase, size * mesh.etp)


def _over_etp(node: fx.Node, phase: str) -> str:
    """Parts as long as each other need no all-to-all to go to all ranks, and to be summed."""
    if node.target in exchange.MOVING:
        return ALL_TO_ALL
    return ALL_GATHER if (node.target is exchange.send_slots) == (phase == "forward") else REDUCE_SCATTER


def sent_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes of the rows, or slots, that one rank of tp sends, of those that all have; the most that any does."""
    shape, size = list(shape_of(node)), node.meta["val"].element_size()
    if node.target in exchange.OF_SLOTS:
        slots = int(node.args[2])  # pyright: ignore[reportArgumentType]
        shape[slots] = share_of_slots(shape[slots], mesh)
        return prod(shape) * size
    return ceil(shape[0] / mesh.tp) * prod(shape[1:]) * size
