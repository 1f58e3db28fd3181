"""The rows of layers of experts: the ranks of each expert, and the bytes of dispatch and combine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from passes.blocks.places import Places
from passes.moe import exchange
from planner.decisions import Decisions
from planner.exchanges.rows_of_experts import bytes_over_ep, exchanges_of, sent_bytes

ROWS, SLOTS = "rows", "slots"
ONCE_TO_A_RANK, ONCE_TO_A_NODE = "tokens, once to a rank", "tokens, once to a node"


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """A layer: ``num_experts``, ``top_k`` of them for a token (0: all that choose it), and ``how`` tokens are
    dispatched.

    ``ranks``: of each ep rank of its stage the ranks with its experts; ep rank r has num_experts / ep of them, from
    r · num_experts / ep on. Empty if experts are sharded like other layers. ``bytes``: of all that one rank sends to
    experts in one microbatch, and gets back. ``sends``: what travels.
    """

    block: str
    num_experts: int
    top_k: int
    how: str
    stage: int
    ranks: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0
    sends: str = ""


def experts_rows(decisions: Decisions, places: Places) -> tuple[ExpertsPlan, ...]:
    """One row a layer, in the model's order."""
    return tuple(_rows(decisions, places))


def _rows(decisions: Decisions, places: Places) -> Iterator[ExpertsPlan]:
    stages, mesh = decisions.stages, decisions.mesh
    sent, sends = _sent_bytes(decisions), _sends(decisions)
    for layer in decisions.experts.layers:
        node = decisions.program.node(layer.chosen[0])
        stage = next(s for s in range(stages.num_stages) if stages.runs_on(node.name, s))
        held: tuple[tuple[int, ...], ...] = ()
        if mesh.has_expert_axes:
            held = tuple(_ranks_of(decisions, ep_rank, mesh.pp_rank_of(stage)) for ep_rank in range(mesh.ep))
        size = sent.get(layer.chosen, 0)
        what = sends.get(layer.chosen, SLOTS if layer.sent else ROWS) if size else ""
        yield ExpertsPlan(places.block(node), layer.num_experts, layer.top_k, layer.how, stage, held, size, what)


def _sends(decisions: Decisions) -> dict[tuple[str, ...], str]:
    """Of layers that send tokens: what travels."""
    found: dict[tuple[str, ...], str] = {}
    for node in exchanges_of(decisions):
        if node.target is exchange.dispatch_tokens:
            here = node.all_input_nodes[-1]
            is_summed = any(user.target is exchange.combine for user in here.users)
            once = ONCE_TO_A_RANK if here.args[4] == 1 else ONCE_TO_A_NODE
            found[_chosen(node)] = once if is_summed else f"{once}; rows back"
    return found


def _chosen(node: fx.Node) -> tuple[str, ...]:
    """The choices that a call of the exchange follows."""
    counts = node.all_input_nodes[-1].all_input_nodes[0]
    return tuple(n.name for n in counts.all_input_nodes)


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
        if node.target in (exchange.dispatch, exchange.dispatch_tokens):
            chosen = _chosen(node)
            found[chosen] = found.get(chosen, 0) + bytes_over_ep(node, decisions.mesh)
    for layer in decisions.experts.layers:
        if layer.sent:
            found[layer.chosen] = sum(sent_bytes(decisions.program.node(n), decisions.mesh) for n in layer.sent)
    return found
