"""The rows of layers of experts: the ranks of each expert, and the bytes of dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from passes.blocks.places import Places
from passes.moe import exchange
from planner.decisions import Decisions
from planner.exchanges.rows_of_experts import exchanges_of, sent_bytes


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """A layer: ``num_experts``, ``top_k`` of them for a token (0: all that choose it), and ``how`` tokens are
    dispatched.

    ``ranks``: of each ep rank of its stage the ranks with its experts; ep rank r has num_experts / ep of them, from
    r · num_experts / ep on. Empty if experts are sharded like other layers. ``bytes``: of the rows that one rank sends
    to experts in one microbatch, and gets back.
    """

    block: str
    num_experts: int
    top_k: int
    how: str
    stage: int
    ranks: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0


def experts_rows(decisions: Decisions, places: Places) -> tuple[ExpertsPlan, ...]:
    """One row a layer, in the model's order."""
    return tuple(_rows(decisions, places))


def _rows(decisions: Decisions, places: Places) -> Iterator[ExpertsPlan]:
    stages, mesh = decisions.stages, decisions.mesh
    sent = _sent_bytes(decisions)
    for layer in decisions.experts.layers:
        node = decisions.program.node(layer.chosen[0])
        stage = next(s for s in range(stages.num_stages) if stages.runs_on(node.name, s))
        held: tuple[tuple[int, ...], ...] = ()
        if mesh.has_expert_axes:
            held = tuple(_ranks_of(decisions, ep_rank, mesh.pp_rank_of(stage)) for ep_rank in range(mesh.ep))
        size = sent.get(layer.chosen, 0)
        yield ExpertsPlan(places.block(node), layer.num_experts, layer.top_k, layer.how, stage, held, size)


def _ranks_of(decisions: Decisions, ep_rank: int, pp_rank: int) -> tuple[int, ...]:
    mesh = decisions.mesh
    places = (
        {"tp": etp, "ep": ep_rank, "dp": edp, "pp": pp_rank} for edp in range(mesh.edp) for etp in range(mesh.etp)
    )
    return tuple(sorted(mesh.expert.rank_of(place) for place in places))


def _sent_bytes(decisions: Decisions) -> dict[tuple[str, ...], int]:
    """Choices of a layer → bytes of the rows that follow from them, of one rank."""
    found: dict[tuple[str, ...], int] = {}
    if not decisions.mesh.has_expert_axes or decisions.mesh.ep == decisions.mesh.etp == 1:  # no row leaves its rank
        return found
    for node in exchanges_of(decisions):
        if node.target is exchange.dispatch:
            counts = node.all_input_nodes[1].all_input_nodes[0]
            chosen = tuple(n.name for n in counts.all_input_nodes)
            found[chosen] = found.get(chosen, 0) + sent_bytes(node, decisions.mesh)
    for layer in decisions.experts.layers:
        if layer.sent:
            found[layer.chosen] = sum(sent_bytes(decisions.program.node(n), decisions.mesh) for n in layer.sent)
    return found
