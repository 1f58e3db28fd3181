"""Peak bytes of full weights and gradients on one rank, if ranks keep shards of them (zero 2 and 3).

weights     the most that are gathered at once (planner.exchanges.collectives)
gradients   a bucket is allocated at the first backward that adds to it, and reduced after the last one; it is freed
            when the reduction of the next bucket starts. In a schedule with W, a bucket lives from the first B or W
            that adds to it to its reduction at the end of the next W of its chunk
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.own_linears import knows_places, reached_by_backward
from planner.cost.cut.ops import puts_aside
from planner.exchanges.collectives import gathered_weights
from planner.pipeline.actions import Order
from planner.pipeline.schedule import SchedulePlan
from planner.sharding.buffers import Buffer
from planner.sharding.parameters import parameters_of_rank
from planner.sharding.residency import Unit
from planner.trace.lowered import Lowered


@dataclass(frozen=True, slots=True)
class Filling:
    """A bucket that the backward of a stage fills. ``size`` in bytes; ``calls``: those with a backward, or a W, that
    adds to it, in the order of the forward; ``place``: buckets are reduced in descending order of it.
    """

    unit: Unit
    size: int
    place: int
    calls: Sequence[int]


@dataclass(frozen=True, slots=True)
class Apart:
    """The buckets of a chunk with W: those that its B adds to (``early``), those that its W adds to (``late``), and the
    bytes of all, in the order of their reductions.
    """

    early: frozenset[Unit]
    late: frozenset[Unit]
    sizes: Mapping[Unit, int]


def whole_bytes(lowered: Lowered, schedule: SchedulePlan) -> list[int]:
    """Return the peak bytes of full weights and gradients on each pp rank."""
    shards, decisions, of_ranks = lowered.shards, lowered.decisions, []
    if not any(buffer.scatters for buffer in shards.buffers):
        return [0] * len(schedule.orders)
    for rank, gathered in enumerate(gathered_weights(lowered, schedule.orders)):
        buffers = [buffer for buffer in shards.buffers_of_rank(rank) if buffer.scatters]
        chunks = decisions.mesh.stages_of(rank)
        if schedule.has_weights:
            apart = [_apart(lowered, buffers, rank, stage) for stage in chunks]
            most = most_until_weights(schedule.orders[rank], apart)
        else:
            most = max(most_gradients(_fillings(lowered, buffers, rank, stage)) for stage in chunks)
        of_ranks.append(gathered.most_bytes + most)
    return of_ranks


def most_until_weights(order: Order, chunks: Sequence[Apart]) -> int:
    """Return the peak gradient bytes in the ``order`` of a rank. A W ends with the reductions of all buckets of its
    chunk, one after the other; a bucket without gradients since the last W is allocated for that, with zeros.
    """
    sizes = {unit: size for chunk in chunks for unit, size in chunk.sizes.items()}
    alive, most = set[Unit](), 0
    for kind, _, number in order:
        chunk = chunks[number]
        if kind == "B":
            alive |= chunk.early
        if kind == "W":
            alive |= chunk.late
            before = set[Unit]()
            for unit in chunk.sizes:
                alive.add(unit)
                most = max(most, sum(sizes[each] for each in alive))
                alive -= before
                before = {unit}
            alive -= before
    return most


def most_gradients(buckets: Sequence[Filling]) -> int:
    """Return the peak gradient bytes in the backward of one stage."""
    order = sorted(buckets, key=lambda bucket: -bucket.place)
    opened = [(-max(bucket.calls), 0, n) for n, bucket in enumerate(order)]
    filled = [(-min(bucket.calls), 1, n) for n, bucket in enumerate(order)]
    alive, full, begun, most = set[int](), set[int](), 0, 0
    for _, is_full, number in sorted(opened + filled):
        if not is_full:
            alive.add(number)
            most = max(most, sum(order[n].size for n in alive))
            continue
        full.add(number)
        while begun in full:  # reductions start in the same order on all ranks, each after the previous one
            alive.discard(begun - 1)
            begun += 1
    return most


def _apart(lowered: Lowered, buffers: Sequence[Buffer], pp_rank: int, stage: int) -> Apart:
    trace, buckets = lowered.trace(stage), _fillings(lowered, buffers, pp_rank, stage)
    waits = {bucket.unit: {puts_aside(trace, trace.calls[at]) for at in bucket.calls} for bucket in buckets}
    early, late = (frozenset(unit for unit, are in waits.items() if wait in are) for wait in (False, True))
    return Apart(early, late, {b.unit: b.size for b in sorted(buckets, key=lambda bucket: -bucket.place)})


def _fillings(lowered: Lowered, buffers: Sequence[Buffer], pp_rank: int, stage: int) -> list[Filling]:
    """Return the buckets that the backward of ``stage`` fills."""
    calls_of, fillings = _gradient_calls(lowered, stage), []
    place = {p.fqn: number for number, p in enumerate(parameters_of_rank(lowered.decisions, pp_rank))}
    for number, buffer in enumerate(buffers):
        for bucket in buffer.layout.buckets:
            names = [slot.name for slot in bucket.slots]
            calls = [at for name in names for at in calls_of.get(name, ())]
            size, first = len(bucket.world) * buffer.gradient_dtype.itemsize, min(place[name] for name in names)
            if calls:
                fillings.append(Filling((number, bucket.index), size, first, calls))
    return fillings


def _gradient_calls(lowered: Lowered, stage: int) -> dict[str, list[int]]:
    """Return parameter → indices of the calls with a backward that adds to its bucket: each of our own products, and
    the first of all other readers, because autograd sums their gradients before it accumulates them.
    """
    trace, module, parameters = lowered.trace(stage), lowered.stage(stage).root, lowered.decisions.program.parameters
    calls, by_autograd = dict[str, list[int]](), dict[str, int]()
    reached = {graph: reached_by_backward(graph) for graph in {call.node.graph for call in trace.calls}}
    for at, call in enumerate(trace.calls):
        if call.node not in reached[call.node.graph]:
            continue
        is_own = knows_places(call.node, module) and trace.values[call.operands[0]].like.requires_grad
        for source in call.node.all_input_nodes:
            name = parameters.get(source.meta.get("origin", "")) if source.op == "get_attr" else None
            if name is not None and is_own:
                calls.setdefault(name, []).append(at)
            elif name is not None:
                by_autograd.setdefault(name, at)
    for name, at in by_autograd.items():
        calls.setdefault(name, []).append(at)
    return calls
