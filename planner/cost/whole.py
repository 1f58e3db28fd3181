"""Bytes of full weights and gradients on one rank while it needs them, if ranks keep shards of them (zero 2 and 3).

weights     the most that its moves make whole at once (planner.exchanges.collectives)
gradients   a bucket fills from the first backward that gives it a gradient to the last; then its sums are under way
            until those of the next bucket begin. If gradients wait for a W of the schedule, a bucket is held from the
            first B or W that gives it a gradient to its sum at the end of the next W of its chunk
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
    """A bucket as a stage fills it: its bytes, and the ``calls``, in the order of the forward, with a backward, or a W,
    that gives it a gradient. ``place``: buckets are summed from the greatest to the least.
    """

    unit: Unit
    size: int
    place: int
    calls: Sequence[int]


@dataclass(frozen=True, slots=True)
class Apart:
    """The buckets of a chunk with a W: those that its B gives gradients, those that its W gives some, and the bytes of
    all, in the order of their sums.
    """

    early: frozenset[Unit]
    late: frozenset[Unit]
    sizes: Mapping[Unit, int]


def whole_bytes(lowered: Lowered, schedule: SchedulePlan) -> list[int]:
    shards, decisions, found = lowered.shards, lowered.decisions, []
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
        found.append(gathered.most_bytes + most)
    return found


def most_until_weights(order: Order, chunks: Sequence[Apart]) -> int:
    """The most bytes at once in the ``order`` of a rank. A W ends with the sums of all buckets of its chunk, one after
    the other: one that nothing has opened since the W before opens only then, with zeros.
    """
    sizes = {unit: size for chunk in chunks for unit, size in chunk.sizes.items()}
    held, most = set[Unit](), 0
    for kind, _, number in order:
        chunk = chunks[number]
        if kind == "B":
            held |= chunk.early
        if kind == "W":
            held |= chunk.late
            before = set[Unit]()
            for unit in chunk.sizes:
                held.add(unit)
                most = max(most, sum(sizes[each] for each in held))
                held -= before
                before = {unit}
            held -= before
    return most


def most_gradients(buckets: Sequence[Filling]) -> int:
    """The most bytes at once in the backward of one stage."""
    order = sorted(buckets, key=lambda bucket: -bucket.place)
    opened = [(-max(bucket.calls), 0, n) for n, bucket in enumerate(order)]
    filled = [(-min(bucket.calls), 1, n) for n, bucket in enumerate(order)]
    held, full, begun, most = set[int](), set[int](), 0, 0
    for _, is_full, number in sorted(opened + filled):
        if not is_full:
            held.add(number)
            most = max(most, sum(order[n].size for n in held))
            continue
        full.add(number)
        while begun in full:  # sums begin in one order on all ranks, each when the one before has ended
            held.discard(begun - 1)
            begun += 1
    return most


def _apart(lowered: Lowered, buffers: Sequence[Buffer], pp_rank: int, stage: int) -> Apart:
    trace, found = lowered.trace(stage), _fillings(lowered, buffers, pp_rank, stage)
    waits = {bucket.unit: {puts_aside(trace, trace.calls[at]) for at in bucket.calls} for bucket in found}
    early, late = (frozenset(unit for unit, are in waits.items() if wait in are) for wait in (False, True))
    return Apart(early, late, {b.unit: b.size for b in sorted(found, key=lambda bucket: -bucket.place)})


def _fillings(lowered: Lowered, buffers: Sequence[Buffer], pp_rank: int, stage: int) -> list[Filling]:
    """The buckets that the backward of ``stage`` fills."""
    given, found = _given(lowered, stage), []
    place = {p.fqn: number for number, p in enumerate(parameters_of_rank(lowered.decisions, pp_rank))}
    for number, buffer in enumerate(buffers):
        for bucket in buffer.layout.buckets:
            names = [slot.name for slot in bucket.slots]
            calls = [at for name in names for at in given.get(name, ())]
            size, first = len(bucket.world) * buffer.gradient_dtype.itemsize, min(place[name] for name in names)
            if calls:
                found.append(Filling((number, bucket.index), size, first, calls))
    return found


def _given(lowered: Lowered, stage: int) -> dict[str, list[int]]:
    """Of each parameter the numbers of the calls with a backward that gives it a gradient: each of our own products,
    and of all other readers the first, as autograd adds their gradients before it gives the sum.
    """
    trace, module, parameters = lowered.trace(stage), lowered.stage(stage).root, lowered.decisions.program.parameters
    found, by_autograd = dict[str, list[int]](), dict[str, int]()
    reached = {graph: reached_by_backward(graph) for graph in {call.node.graph for call in trace.calls}}
    for at, call in enumerate(trace.calls):
        if call.node not in reached[call.node.graph]:
            continue
        is_own = knows_places(call.node, module) and trace.values[call.operands[0]].like.requires_grad
        for source in call.node.all_input_nodes:
            name = parameters.get(source.meta.get("origin", "")) if source.op == "get_attr" else None
            if name is not None and is_own:
                found.setdefault(name, []).append(at)
            elif name is not None:
                by_autograd.setdefault(name, at)
    for name, at in by_autograd.items():
        found.setdefault(name, []).append(at)
    return found
