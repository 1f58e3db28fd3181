"""The rows of a plan's collectives: every collective of a microbatch, in the order of the stages.

Most are read from the traces of the lowered stages, in which ops on tensors without memory record their collectives.
Computed here are the dispatch and combine of experts, with a number of rows that depends on the routing, and the values
that cross a stage boundary, with their gradients.

``bytes`` are those of the full tensor: the sum of an all-reduce, the result of an all-gather, the operand of a
reduce-scatter. For rows of experts over ep: of this rank's own rows, which it sends and gets back for any routing; over
etp, where a rank forwards received rows to all ranks with a shard of the expert: as if all experts got equally many.
Slots do not depend on the routing: E · C / tp · hidden, with padding if tp does not divide C.

Tokens sent once per rank are counted for uniformly random choices. If a token chooses k of E experts, it chooses none
of c given experts with probability C(E − c, k) / C(E, k). So a tp rank sends t · ep / tp · (1 − that for c = E / ep).
If ep spans nodes, it sends t · nodes / tp · (1 − that for c = E / nodes) between nodes, and the former within its node.

All-gathers of sharded weights (zero 3) are counted by walking through a step of each pp rank:

    for action of the rank's order:  for visit of its stage:  residency.need(units, units of the next visit)

The runtime uses the same class (planner.sharding.residency), so it runs exactly these.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, comb, prod

from torch import fx

from passes.blocks.blocks import Places
from passes.errors import PlanError
from passes.gather_weights import Visit, moves_of
from passes.moe import exchange
from passes.moe.domain import share_of_slots
from passes.moe.exchange import EXCHANGES
from passes.ops.parameter_gate import Units
from passes.program.ops.aten import shape_of
from passes.program.source_lines import where_of
from passes.types.conversions import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, CollectivePlan
from planner.decisions import Decisions
from planner.mesh import BETWEEN_NODES, IN_A_NODE, Mesh
from planner.pipeline.actions import Order
from planner.pipeline.schedule import SchedulePlan
from planner.recompute.decide import reruns
from planner.sharding.residency import Residency, Unit
from planner.sharding.shards import Shards
from planner.trace.handles import Sent
from planner.trace.lowered import Lowered
from planner.trace.trace import TraceCall


def collective_rows(lowered: Lowered, places: Places) -> tuple[CollectivePlan, ...]:
    rows = rows_of_stages(lowered, places)
    if lowered.decisions.terms.in_turn > 1:  # all forwards of a step run twice
        rows = [replace(row, count=2) if row.phase == "forward" else row for row in rows]
    return tuple(rows)


def rows_of_stages(lowered: Lowered, places: Places) -> list[CollectivePlan]:
    """Return one row for each collective of the forward and backward of a microbatch."""
    decisions, shards = lowered.decisions, lowered.shards
    rows: list[CollectivePlan] = []
    for stage in range(lowered.num_stages):
        trace = lowered.trace(stage)
        rows += _boundary_rows(decisions, shards, places, stage - 1, stage)
        rows += (row for call in trace.calls for row in _rows_of_call(decisions, call, stage, places))
        for at in reruns(trace, lowered.recomputed):
            again = _rows_of_call(decisions, trace.calls[at], stage, places)
            rows += (replace(row, phase="backward", again=True) for row in again if row.phase == "forward")
        rows += _boundary_rows(decisions, shards, places, stage, stage)
    return rows


def sent_of_call(decisions: Decisions, call: TraceCall) -> Iterable[Sent]:
    """Return the collectives of one call, in forward and backward."""
    node = decisions.program.node(call.name)
    if call.changed is None and node.target in EXCHANGES and decisions.mesh.has_expert_axes:
        return (_of_counts if node.target is exchange.meet else _of_rows)(node, decisions.mesh)
    return call.seen.sent


def _rows_of_call(decisions: Decisions, call: TraceCall, stage: int, places: Places) -> Iterator[CollectivePlan]:
    node = decisions.program.node(call.name)
    if call.changed is not None and call.changed.how.name in ("f", "gather"):  # listed at the reader
        reader = call.changed.readers[0]
        node = decisions.program.node(reader) if reader not in ("send", "loss") else node
    yield from (_row(places, node, stage, each) for each in sent_of_call(decisions, call))


def _row(places: Places, node: fx.Node, stage: int, sent: Sent) -> CollectivePlan:
    axis, kind, phase, size = sent
    return CollectivePlan(kind, axis, phase, places.text(node), size, 1, "microbatch", stage, places.block(node))


def _boundary_rows(
    decisions: Decisions, shards: Shards, places: Places, cut: int, stage: int
) -> Iterator[CollectivePlan]:
    """Yield the messages that ``stage`` sends or receives at boundary ``cut``; none between chunks of one rank."""
    if cut < 0 or decisions.mesh.pp_rank_of(cut) == decisions.mesh.pp_rank_of(cut + 1):
        return
    sends = cut == stage
    for value in shards.boundaries[cut]:
        node = decisions.program.node(value.name)
        for phase in ("forward", "backward") if value.requires_grad else ("forward",):
            kind = "send" if sends == (phase == "forward") else "recv"
            yield _row(places, node, stage, Sent("pp", kind, phase, value.bytes))


INDEX_BYTES = 4  # of the index of a row


def exchanges_of(decisions: Decisions) -> list[fx.Node]:
    """Return the calls that exchange counts, dispatch rows and combine them, in the order of the graph."""
    nodes = decisions.program.graph.graph.find_nodes
    return sorted(n for target in exchange.EXCHANGES for n in nodes(op="call_function", target=target))


def _of_rows(node: fx.Node, mesh: Mesh) -> Iterator[Sent]:
    for phase in ("forward", "backward") if node.meta["grad"] else ("forward",):
        for axis, size in _over_ep(node, mesh):
            yield Sent(axis, ALL_TO_ALL, phase, size)
        if mesh.etp > 1:
            yield Sent("etp", _over_etp(node, phase), phase, sent_bytes(node, mesh) * mesh.etp)


def _of_counts(node: fx.Node, mesh: Mesh) -> Iterator[Sent]:
    """Yield the exchange of counts and, if tokens are sent once per rank, of their row indices."""
    experts, size = shape_of(node)[0], node.meta["val"].element_size()
    tokens = _tokens_of(node)
    figures = 0 if tokens is None else 1 if tokens.nodes == 1 else 2 + mesh.ep // tokens.nodes
    if mesh.ep > 1:
        yield Sent("ep", ALL_TO_ALL, "forward", (experts + mesh.ep * figures) * size)
    if mesh.etp > 1:
        yield Sent("etp", ALL_GATHER, "forward", experts * size // mesh.ep * mesh.etp)
    if tokens is not None:
        yield Sent("ep", ALL_TO_ALL, "forward", ceil(tokens.num_rows / mesh.tp) * INDEX_BYTES)
        if tokens.nodes > 1:
            size = tokens.leaving(tokens.nodes, mesh) * mesh.ep // tokens.nodes
            yield Sent(BETWEEN_NODES, ALL_TO_ALL, "forward", size)


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
    """The routing of a layer: ``num_rows`` of ``num_tokens`` for ``experts`` on ranks of ``nodes`` nodes."""

    experts: int
    num_rows: int
    num_tokens: int
    nodes: int

    def leaving(self, parts: int, mesh: Mesh) -> int:
        """Return how many tokens a tp rank sends to ``parts`` groups of ranks with equally many experts."""
        top_k, others = self.num_rows // self.num_tokens, self.experts - self.experts // parts
        share = 1 - comb(others, top_k) / comb(self.experts, top_k)
        return ceil(self.num_tokens * parts * share / mesh.tp)


def _tokens_of(node: fx.Node) -> _Tokens | None:
    """Return the routing of a layer that sends tokens once per rank, else None. ``node``: its exchange of counts, or a
    call that reads it."""
    here = node if node.target is exchange.meet else node.all_input_nodes[-1]
    if here.target is not exchange.meet or len(here.args) == 2:
        return None
    _, num_rows, _, num_tokens, nodes = here.args
    return _Tokens(shape_of(here)[0], num_rows, num_tokens, nodes)  # pyright: ignore[reportArgumentType]


def _over_etp(node: fx.Node, phase: str) -> str:
    """Return the collective over etp: shards of equal length need no all-to-all."""
    if node.target not in exchange.OF_SLOTS:
        return ALL_TO_ALL
    return ALL_GATHER if (node.target is exchange.send_slots) == (phase == "forward") else REDUCE_SCATTER


def sent_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Return the bytes of rows or slots that one tp rank sends: its share, rounded up."""
    shape, size = list(shape_of(node)), node.meta["val"].element_size()
    if node.target in exchange.OF_SLOTS:
        slots = int(node.args[2])  # pyright: ignore[reportArgumentType]
        shape[slots] = share_of_slots(shape[slots], mesh)
        return prod(shape) * size
    tokens = _tokens_of(node)
    num_rows = shape[0] if tokens is None else tokens.num_rows
    return ceil(num_rows / mesh.tp) * prod(shape[1:]) * size


def bytes_over_ep(node: fx.Node, mesh: Mesh) -> int:
    """Return the bytes that one tp rank sends over ep, directly or by node; if only etp exists, those of its rows."""
    return sum(size for _, size in _over_ep(node, mesh)) if mesh.ep > 1 else sent_bytes(node, mesh)


@dataclass(frozen=True)
class Gathered:
    """All-gathers of weights on one pp rank: ``times`` per step by unit and phase; most bytes of full weights alive."""

    times: Counter[tuple[Unit, str]]
    most_bytes: int


def weight_rows(lowered: Lowered, schedule: SchedulePlan) -> tuple[CollectivePlan, ...]:
    """Return one row for each unit of sharded weights and phase."""
    rows = []
    for pp_rank, gathered in enumerate(gathered_weights(lowered, schedule.orders)):
        buffers, shards = lowered.shards.buffers_of_rank(pp_rank), lowered.shards
        for ((number, index), phase), times in gathered.times.items():
            buffer = buffers[number]
            bucket = buffer.layout.buckets[index]
            count = len(bucket.slots)
            names = f"{count} parameters" if count > 1 else bucket.slots[0].name
            what = f"optimizer.buffers.{shards.buffers.index(buffer)}.buckets.{index}   (weights of {names})"
            size = len(bucket.world) * buffer.gather_dtype.itemsize
            over = buffer.reduced_over
            rows.append(CollectivePlan("all_gather", over, phase, what, size, times, "step", pp_rank))
    return tuple(rows)


def gathered_weights(lowered: Lowered, orders: Sequence[Order], *, evaluates: bool = False) -> list[Gathered]:
    """Return the all-gathers of each pp rank with these ``orders``; empty if no weight is sharded between its uses.
    ``evaluates``: weights are freed after each use.
    """
    shards, mesh = lowered.shards, lowered.decisions.mesh
    if not any(buffer.gathers for buffer in shards.buffers):
        return [Gathered(Counter(), 0) for _ in orders]
    visits = [lowered.visits(stage) for stage in range(lowered.num_stages)]
    twice = not evaluates and lowered.decisions.terms.in_turn > 1
    shards = replace(shards, reshards=True, kept=()) if evaluates else shards
    return [
        _of_rank(order, [visits[stage] for stage in mesh.stages_of(rank)], shards, rank, twice)
        for rank, order in enumerate(orders)
    ]


def _of_rank(order: Order, stages: Sequence[list[Visit]], shards: Shards, pp_rank: int, twice: bool) -> Gathered:
    sizes, sent = dict[Unit, int](), dict[Unit, int]()
    for number, buffer in enumerate(shards.buffers_of_rank(pp_rank)):
        for bucket in buffer.layout.buckets if buffer.gathers else ():
            sizes[number, bucket.index] = len(bucket.world) * buffer.dtype.itemsize
            sent[number, bucket.index] = len(bucket.world) * buffer.gather.itemsize if buffer.gather else 0
    residency = Residency(reshards=shards.reshards, kept=shards.kept_by(pp_rank))
    times, most = Counter[tuple[Unit, str]](), 0
    for phase, units, ahead in _needs(order, stages, twice):
        moves = residency.need(units, ahead)
        times.update((unit, phase) for unit in moves.gathered)
        alive = sum(sizes[unit] for unit in residency.whole) + sum(sent[unit] for unit in residency.coming)
        residency.came(units)
        most = max(most, alive)
    return Gathered(times, most)


def _needs(order: Order, stages: Sequence[list[Visit]], twice: bool) -> Iterator[tuple[str, Units, Units]]:
    """Yield (phase, units that are needed, units to gather ahead) in the order of a rank's step."""
    forwards = [action for action in order if action.kind == "F"] if twice else []
    for action in (*forwards, *order):
        if action.kind != "W":
            forward = action.kind == "F"
            for units, ahead in moves_of(stages[action.chunk], forward=forward):
                yield "forward" if forward else "backward", units, ahead


WIDE = 8  # bytes of a float64
FIGURES = 3  # for each label: its log P, whether it has the highest, how often it was scored


def check_scored(decisions: Decisions) -> None:
    """Raise PlanError if labels cannot be scored: logits are looked up before the last stage, or as partial sums."""
    last = decisions.stages.num_stages - 1
    for pick in decisions.scored.picks:
        if not decisions.stages.runs_on(pick.node, last):
            raise PlanError(
                "a part of the loss is computed before the last stage, but only the last stage scores labels",
                where=where_of(decisions.program.node(pick.node)),
                fix="set mesh.pp: 1, or change pipeline.split",
            )
        reader = decisions.program.node(pick.node)
        if decisions.placements.wanted(reader, 0).kind not in ("I", "V"):
            raise PlanError(
                "the targets' logits are partial sums over tp where the loss looks them up",
                where=where_of(reader),
                fix="set tensor_parallel.overrides: {HEAD: replicate}, with the name of the head",
            )
