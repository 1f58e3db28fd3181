"""Counts the work of the units of a typed, staged graph: traces each stage, and assigns each call to its unit.

Collectives of a call, and the products that overlap them:

f before linears           its all-reduce overlaps the weight gradients (passes.ops.linear)
gather before linears      the second all-gather overlaps the gradient of the value, the reduce-scatter those of weights
all others                 the rank waits
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from passes.ops import meeting
from passes.parameters import LocalParameter
from passes.partition.batch.mixing import batch_flow
from passes.partition.type_changes import sent_type
from passes.pieces import Piece
from passes.program.ops.aten import value_bytes
from passes.program.ops.sequence import over_data
from passes.program.walks import readers, walk
from passes.types.conversions import ALL_GATHER
from planner.cost.cut.fused import fuse, with_fused_saves
from planner.cost.cut.ops import OpsOf, puts_aside
from planner.cost.cut.parts import Homes, Parts, Scaled, Units, following
from planner.cost.cut.units import (
    CallOps,
    Crossing,
    CutWork,
    HeldParameter,
    Message,
    Op,
    Phase,
    Shared,
    Size,
    UnitWork,
    Work,
    ranges_of,
)
from planner.cost.liveness import after_blocks
from planner.exchanges.collectives import sent_of_call
from planner.mesh import BY_ROUTING
from planner.recompute.decide import reruns, with_reruns
from planner.sharding.buckets import padded, start_multiple
from planner.sharding.buffers import gradient_size
from planner.sharding.homes import matrices_of, shared_over
from planner.sharding.parameters import local_parameter
from planner.sharding.shards import value_at
from planner.spec.sections import FULL_ITERATION, GLOBAL
from planner.spec.spec import Spec
from planner.trace.handles import Sent
from planner.trace.lowered import Lowered
from planner.trace.trace import StageTrace, TraceCall


class _Side:
    """Kernels and collectives of a unit in one direction, while they are counted. ``captured``: the number of kernels
    in CUDA graphs; ``graphs``: the indices of these graphs.
    """

    def __init__(self) -> None:
        self.ops: Counter[Op] = Counter()
        self.messages: Counter[Message] = Counter()
        self.captured = 0
        self.graphs: set[int] = set()

    def capture(self, graph: int | None, kernels: int) -> None:
        if graph is not None and kernels:
            self.captured += kernels
            self.graphs.add(graph)

    def phase(self, *, is_captured: bool = False) -> Phase:
        """Return the counts. ``is_captured``: by a full-iteration graph."""
        saved = self.ops.total() if is_captured else self.captured - len(self.graphs)
        return Phase(tuple(self.ops.items()), tuple(self.messages.items()), saved)


class Builder:
    """Counts the work of each unit, and the work that several units share. ``ends``: as in CutWork."""

    def __init__(self, lowered: Lowered, spec: Spec, *, ends: bool = False) -> None:
        decisions = lowered.decisions
        self.lowered, self.decisions, self.spec = lowered, decisions, spec
        program = decisions.program
        self.micro = next((int(program.node(name).meta["val"].shape[0]) for name in program.inputs), 1)
        self.ends, self.homes = ends, Homes(decisions, ends=ends)
        on_batch = set(walk(map(program.node, program.inputs), readers))
        flow = batch_flow(program, on_batch) if self.micro > 1 else {}
        nodes = list(program.graph.graph.nodes)
        self.follows = following(nodes, set(program.inputs), flow)
        self.sides: dict[tuple[Units, str], _Side] = {}  # by units and direction: forward, backward, weights, again …
        self.parts = Parts(self.micro, frozenset(after_blocks(decisions)))
        captured = [region for region in lowered.regions if not region.refused]
        self.graph_of = {(r.stage, name): r.index for r in captured for name in r.nodes}
        self.is_captured = spec.cuda_graphs.impl != "none" and FULL_ITERATION in spec.cuda_graphs.scope
        self._seen: set[object] = set()

    def _side(self, units: Units, direction: str) -> _Side:
        return self.sides.setdefault((units, direction), _Side())

    def _add(self, kinds: Mapping[str, Sequence[Piece]], *, with_memory: bool) -> None:
        """Count the calls of every stage, and those that each kind of recomputation reruns."""
        blocks = self.decisions.stages.blocks_of_stage
        ranges = ranges_of(list(map(len, blocks)) if any(blocks) else [1], ends=self.ends)
        for index in range(self.decisions.stages.num_stages):
            trace = self.lowered.trace(index)
            ops = OpsOf(trace, self.micro, self.decisions.program.node, self.follows)
            of_stage = [self.homes.of_call(call) for call in trace.calls]
            kernels, piece_of = fuse(trace, ops, [ops.of(call) for call in trace.calls], self.lowered.pieces)
            self._calls(trace, ops, of_stage, kernels, piece_of)
            for kind, pieces in kinds.items():
                self._again(kind, trace, pieces, of_stage, kernels)
                if with_memory:
                    saved = with_fused_saves(trace, self.lowered.pieces, pieces)
                    scaled = Scaled.of(with_reruns(saved, pieces), ops, self.homes, range(*ranges[index]))
                    self.parts.stages.setdefault(kind, []).append(scaled)

    def _calls(
        self, trace: StageTrace, ops: OpsOf, homes: list[Units], kernels: list[CallOps], piece_of: Mapping[int, int]
    ) -> None:
        reading: dict[int, list[int | None]] = {}
        for at, (call, units, of) in enumerate(zip(trace.calls, homes, kernels, strict=True)):
            if len(units) > 1:  # several stages trace this call: count it once
                key = call.name, None if call.changed is None else call.changed.after, units
                if key in self._seen:
                    continue
                self._seen.add(key)
            forward, backward = self._side(units, "forward"), self._side(units, "backward")
            forward.ops.update(of.forward)
            backward.ops.update(of.backward)
            added = list(self._added(trace, ops, call, reading, piece_of.get(at)))
            backward.ops.update(added)
            graph = self.graph_of.get((trace.index, call.name))
            forward.capture(graph, len(of.forward))
            backward.capture(graph, len(of.backward) + len(added))
            if puts_aside(trace, call):
                self._side(units, "weights").ops.update(of.of_held)
            for sent in sent_of_call(self.decisions, call):
                meanwhile = of.of_value if sent.kind == ALL_GATHER else of.of_held
                side = forward if sent.phase == "forward" else backward
                overlaps = sent.phase == "backward" and call.changed is not None
                side.messages[self._message(sent, call, meanwhile if overlaps else ())] += 1

    def _added(
        self, trace: StageTrace, ops: OpsOf, call: TraceCall, reading: dict[int, list[int | None]], piece: int | None
    ) -> Iterator[Op]:
        """Yield the kernels that sum gradients of values with several readers; a compiled ``piece`` sums its own."""
        for number, gradient in zip(call.operands, call.seen.gradients, strict=False):
            value = trace.values[number]
            if gradient is None or not value.like.requires_grad or value.memory in trace.outside:
                continue
            known = reading.setdefault(number, [])
            if piece is not None and piece in known:
                continue
            known.append(piece)
            if len(known) > 1:
                dtype = str(value.like.dtype).removeprefix("torch.")
                yield Op(dtype, Size.of(3 * value.like.bytes, self.micro, follows=ops.size_follows(number)))

    def _again(
        self, kind: str, trace: StageTrace, pieces: Sequence[Piece], homes: list[Units], kernels: list[CallOps]
    ) -> None:
        for at in reruns(trace, pieces):
            side, call = self._side(homes[at][:1], f"again {kind}"), trace.calls[at]
            side.ops.update(kernels[at].forward)
            messages = (sent for sent in sent_of_call(self.decisions, call) if sent.phase == "forward")
            side.messages.update(self._message(sent, call, ()) for sent in messages)

    def _message(self, sent: Sent, call: TraceCall, beside: tuple[Op, ...]) -> Message:
        """Return the message of a collective. ``beside``: the products that overlap it."""
        is_routed = sent.axis in BY_ROUTING
        size = Size.of(sent.bytes, self.micro, follows=call.name in self.follows or is_routed)
        if is_routed and call.node.target in meeting.MOVING:
            size = size.times(self.decisions.fullest)  # all ranks wait for the one with the most rows
        return Message(sent.kind, sent.axis, size, beside)

    # ---- parameters, and values sent between stages

    def held(self) -> tuple[dict[int, Counter[HeldParameter]], dict[int, int], list[Shared]]:
        """Return the parameters and buffer bytes of each unit, and those that several units read. Also counts the
        kernel that adds each gradient to its buffer.
        """
        mesh, program = self.decisions.mesh, self.decisions.program
        place, parts = mesh.place(0), self.decisions.expert_parts
        own: dict[int, Counter[HeldParameter]] = {}
        buffers: Counter[int] = Counter()
        tied: list[Shared] = []
        for name, units in self.homes.of_placeholder.items():
            node = program.node(name)
            if not units or (name in parts and not parts[name].is_held(mesh.ep, 0)):
                continue
            if name in program.parameters:
                stage = self.decisions.stages.parameter_stages[name][0]
                held = self._parameter(local_parameter(self.decisions, node, stage, place))
                if node.meta["grad"]:
                    moved = held.itemsize + 2 * gradient_size(self.spec.precision.gradients, held.itemsize)
                    self._side(units, "backward").ops[Op(held.dtype, Size(float(held.elements * moved)))] += 1
                if len(units) > 1:
                    tied.append(Shared(units, held=held))
                for unit in units if len(units) == 1 else ():
                    own.setdefault(unit, Counter())[held] += 1
            elif name in program.buffers or name in program.constants:
                if len(units) > 1:
                    tied.append(Shared(units, buffer_bytes=value_bytes(node)))
                for unit in units if len(units) == 1 else ():
                    buffers[unit] += value_bytes(node)
        return own, buffers, tied

    def _parameter(self, local: LocalParameter) -> HeldParameter:
        elements = prod(local.shape)
        alignment = self.spec.optimizer.alignment if self.spec.optimizer.zero != 0 else "none"
        starts = padded(elements, start_multiple(alignment))
        partial = tuple(axis for axis in local.partial_over if axis != "embedding")
        dtype = str(local.dtype).removeprefix("torch.")
        axis, rules, mesh = local.reduced_over, self.decisions.rules, self.decisions.mesh
        kept = HeldParameter(elements, starts, dtype, local.dtype.itemsize, local.requires_grad, axis, partial)
        if not rules.others and rules.section == kept.rule:
            return kept
        sizes = Counter(matrix.shape for matrix in matrices_of(local, rules, mesh))
        matrices = tuple((count, *shape) for shape, count in sizes.items())
        shared = shared_over(local, mesh, sharded=self.spec.optimizer.zero != 0) if matrices else ""
        return replace(kept, rule=rules.of(local.fqn), matrices=matrices, shared_by=shared)

    def crossing(self) -> list[tuple[Crossing, ...]]:
        """Return, for each unit, the values that are sent if a stage ends with it."""
        decisions, of_units = self.decisions, []
        for names in self.homes.live:
            values = []
            for name in names:
                node = decisions.program.node(name)
                value = value_at(decisions, name, sent_type(decisions.placements.of(node)))
                size = Size.of(value.bytes, self.micro, follows=name in self.follows)
                values.append(Crossing(size, value.requires_grad))
            of_units.append(tuple(values))
        return [*of_units, ()]

    # ---- the result

    def work(self, kinds: Mapping[str, Sequence[Piece]], *, with_memory: bool = True) -> CutWork:
        """Return the work of the cut. ``kinds``: kind of recomputation → the pieces that it reruns."""
        self._add(kinds, with_memory=with_memory)
        own, buffers, tied = self.held()
        crossing, units, unique = self.crossing(), list[UnitWork](), dict[UnitWork, UnitWork]()
        for number in range(self.homes.num_units):
            again = {kind: self._phase((number,), f"again {kind}") for kind in kinds}
            parameters = tuple(own.get(number, Counter()).items())
            unit = UnitWork(self._work((number,)), again, parameters, crossing[number], buffers[number])
            units.append(unique.setdefault(unit, unit))
        several = dict.fromkeys(units for units, _ in self.sides if len(units) > 1)
        return CutWork(
            tuple(units),
            self.micro,
            (*(Shared(units, self._work(units)) for units in several), *tied),
            self.decisions.load().num_figures,
            self.reads_global_sums,
            self.ends,
            tuple(range(len(units))),
            self.parts.stage,
        )

    def _work(self, units: Units) -> Work:
        return Work(*(self._phase(units, direction) for direction in ("forward", "backward", "weights")))

    def _phase(self, units: Units, direction: str) -> Phase:
        side = self.sides.get((units, direction))
        return Phase() if side is None else side.phase(is_captured=self.is_captured)

    @property
    def reads_global_sums(self) -> bool:
        """Whether additional forwards count sums for the loss when a rank runs several microbatches."""
        program = self.decisions.program
        reads = any(program.graph.graph.find_nodes(op="call_function", target=over_data))
        return reads and self.spec.batch.statistics == GLOBAL
