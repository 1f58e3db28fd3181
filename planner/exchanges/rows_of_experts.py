"""The collectives' rows of rows that go to experts: over ep each to its expert's rank, over etp to all holders of a
part.

``bytes``: over ep those of this rank's own rows, which it sends and gets back for any routing; over etp, on which a
rank passes on received rows, as if every expert got equally many. An axis of one rank exchanges nothing. The number of
slots does not depend on the routing, over both axes: E · C / tp · hidden, with padding if tp does not divide C.

Tokens that go once to a rank: as many as choices that are equally likely give. Of E experts a token chooses k; none of
c experts with probability C(E − c, k) / C(E, k), so a tp rank sends t · ep / tp · (1 − that for c = E / ep). If ep
spans nodes, it sends t · nodes / tp · (1 − that for c = E / nodes) between them, and the former within its node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, comb, prod

from torch import fx

from passes.blocks.places import Places
from passes.moe import exchange
from passes.moe.domain import share_of_slots
from passes.program.ops.aten import shape_of
from passes.types.collectives import CollectivePlan
from passes.types.conversions import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from planner.decisions import Decisions
from planner.mesh import BETWEEN_NODES, IN_A_NODE, Mesh

INDEX_BYTES = 4  # of a place


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
        yield from (row(*given) for given in _of_counts(node, mesh))
        return
    size = sent_bytes(node, mesh)
    for phase in ("forward", "backward") if node.meta["grad"] else ("forward",):
        for axis, bytes_over in _over_ep(node, mesh):
            yield row(ALL_TO_ALL, axis, phase, bytes_over)
        if mesh.etp > 1:
            yield row(_over_etp(node, phase), "etp", phase, size * mesh.etp)


def _of_counts(node: fx.Node, mesh: Mesh) -> Iterator[tuple[str, str, str, int]]:
    """(kind, axis, phase, bytes) of the exchange of counts and, if tokens go once to a rank, of their places."""
    experts, size = shape_of(node)[0], node.meta["val"].element_size()
    tokens = _tokens_of(node)
    figures = 0 if tokens is None else 1 if tokens.nodes == 1 else 2 + mesh.ep // tokens.nodes
    if mesh.ep > 1:
        yield ALL_TO_ALL, "ep", "forward", (experts + mesh.ep * figures) * size
    if mesh.etp > 1:
        yield ALL_GATHER, "etp", "forward", experts * size // mesh.ep * mesh.etp
    if tokens is not None:
        yield ALL_TO_ALL, "ep", "forward", ceil(tokens.num_rows / mesh.tp) * INDEX_BYTES
        if tokens.nodes > 1:
            yield ALL_TO_ALL, BETWEEN_NODES, "forward", tokens.leaving(tokens.nodes, mesh) * mesh.ep // tokens.nodes


def _over_ep(node: fx.Node, mesh: Mesh) -> Iterator[tuple[str, int]]:
    if mesh.ep == 1:
        return
    tokens = _tokens_of(node)
    if node.target not in exchange.OF_TOKENS or tokens is None:
        yield "ep", sent_bytes(node, mesh)
        return
    each = prod(shape_of(node)[1:]) * node.meta["val"].element_size()
    if tokens.nodes > 1:
        yield BETWEEN_NODES, tokens.leaving(tokens.nodes, mesh) * each
    yield "ep" if tokens.nodes == 1 else IN_A_NODE, tokens.leaving(mesh.ep, mesh) * each


@dataclass(frozen=True, slots=True)
class _Tokens:
    """``num_rows`` of ``num_tokens``, for ``experts`` on ranks of ``nodes``."""

    experts: int
    num_rows: int
    num_tokens: int
    nodes: int

    def leaving(self, parts: int, mesh: Mesh) -> int:
        """How many a rank of tp sends to ``parts`` that have equally many experts."""
        top_k, others = self.num_rows // self.num_tokens, self.experts - self.experts // parts
        share = 1 - comb(others, top_k) / comb(self.experts, top_k)
        return ceil(self.num_tokens * parts * share / mesh.tp)


def _tokens_of(node: fx.Node) -> _Tokens | None:
    """Of a layer that sends tokens once to a rank: by its exchange of counts, or a call that reads it."""
    here = node if node.target is exchange.meet else node.all_input_nodes[-1]
    if here.target is not exchange.meet or len(here.args) == 2:
        return None
    _, num_rows, _, num_tokens, nodes = here.args
    return _Tokens(shape_of(here)[0], num_rows, num_tokens, nodes)  # pyright: ignore[reportArgumentType]


def _over_etp(node: fx.Node, phase: str) -> str:
    """Parts as long as each other need no all-to-all to go to all ranks, and to be summed."""
    if node.target not in exchange.OF_SLOTS:
        return ALL_TO_ALL
    return ALL_GATHER if (node.target is exchange.send_slots) == (phase == "forward") else REDUCE_SCATTER


def sent_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes of the rows, or slots, that one rank of tp sends, of those that all have; the most that any does."""
    shape, size = list(shape_of(node)), node.meta["val"].element_size()
    if node.target in exchange.OF_SLOTS:
        slots = int(node.args[2])  # pyright: ignore[reportArgumentType]
        shape[slots] = share_of_slots(shape[slots], mesh)
        return prod(shape) * size
    tokens = _tokens_of(node)
    num_rows = shape[0] if tokens is None else tokens.num_rows
    return ceil(num_rows / mesh.tp) * prod(shape[1:]) * size


def bytes_over_ep(node: fx.Node, mesh: Mesh) -> int:
    """Bytes that one rank of tp sends over ep, in one step or two; over etp alone, of its rows."""
    return sum(size for _, size in _over_ep(node, mesh)) if mesh.ep > 1 else sent_bytes(node, mesh)
