"""From a typed, staged graph to the work of its units: traces each stage, and assigns each call to its unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from passes.parameters import LocalParameter
from passes.partition.batch.flow import batch_flow
from passes.partition.type_changes import sent_type
from passes.pieces import Piece
from passes.program.ops.aten import value_bytes
from passes.program.ops.over_data import over_data
from passes.program.walks import readers, walk
from planner.compiled.pieces import decide_compiled
from planner.cost.cut.fused import FusedCalls, fuse
from planner.cost.cut.homes import Homes, Units, following
from planner.cost.cut.keeping import Keeping, Kept, loose_of
from planner.cost.cut.kernels import CallOps, Op, Size
from planner.cost.cut.messages import MessagesOf
from planner.cost.cut.ops import OpsOf
from planner.cost.cut.units import (
    Crossing,
    CutWork,
    HeldParameter,
    KindWork,
    Loose,
    Message,
    Phase,
    Shared,
    Tied,
    UnitWork,
)
from planner.cost.fused_saves import with_fused_saves
from planner.cost.let_go import let_go_of
from planner.cost.memory import after_blocks
from planner.saved.lowered import Lowered
from planner.saved.trace import Call, StageTrace
from planner.sharding.boundaries import value_at
from planner.sharding.buckets import padded, start_multiple
from planner.sharding.homes import matrices_of, shared_over
from planner.sharding.parameters import local_parameter
from planner.spec.sections import FULL_ITERATION, GLOBAL
from planner.spec.spec import Spec


class _Side:
    """Kernels and collectives of a unit in one direction, while they are counted. ``captured``: kernels in graphs, of
    the ``graphs`` by their indices.
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
        """``is_captured``: by a graph of the full iteration."""
        saved = self.ops.total() if is_captured else self.captured - len(self.graphs)
        return Phase(tuple(self.ops.items()), tuple(self.messages.items()), saved)


class Builder:
    """Owns the counts of each unit, and of values that several units share. ``ends``: as CutWork has it."""

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
        self.messages = MessagesOf(decisions, self.follows, self.micro)
        self.after = frozenset(after_blocks(decisions))
        self.sides: dict[tuple[Units, str], _Side] = {}  # by homes and direction: forward, backward, again kind
        self.kept: dict[tuple[str, int], Kept] = {}
        self.loose: list[Loose] = []
        self.aside: dict[int, Size] = {}  # by unit
        captured = [region for region in lowered.regions if not region.refused]
        self.graph_of = {(r.stage, name): r.index for r in captured for name in r.nodes}
        self.is_captured = spec.cuda_graphs.impl != "none" and FULL_ITERATION in spec.cuda_graphs.scope
        self._seen: set[object] = set()

    def _side(self, units: Units, direction: str) -> _Side:
        return self.sides.setdefault((units, direction), _Side())

    def add(self, kinds: Mapping[str, Sequence[Piece]], *, with_memory: bool = True) -> None:
        """Count every stage, and the calls that each kind of recompute repeats in it."""
        recomputed = next(iter(kinds.values())) if len(kinds) == 1 else ()
        asked = self.spec.compiles(on_gpu=self.decisions.on_gpu)
        compiled = decide_compiled(asked, self.lowered, self.lowered.regions, recomputed).pieces
        for index in range(self.decisions.stages.num_stages):
            trace = self.lowered.trace(index)
            ops = OpsOf(trace, self.micro, self.decisions.program.node, self.follows)
            of_stage = [self.homes.of_call(call) for call in trace.calls]
            fused = fuse(trace, ops, [ops.of(call) for call in trace.calls], compiled)
            found = fused.kernels
            self._calls(trace, ops, of_stage, fused)
            for kind, pieces in kinds.items():
                self._again(kind, trace, pieces, of_stage, found)
                if with_memory:
                    self._memory(kind, with_fused_saves(trace, compiled, pieces), ops, pieces)
        self._into_buffers()

    def _calls(self, trace: StageTrace, ops: OpsOf, homes: list[Units], fused: FusedCalls) -> None:
        reading: dict[int, list[int | None]] = {}
        for at, (call, units, of) in enumerate(zip(trace.calls, homes, fused.kernels, strict=True)):
            if len(units) > 1:  # another stage has it too
                key = call.name, None if call.changed is None else call.changed.after, units
                if key in self._seen:
                    continue
                self._seen.add(key)
            forward, backward = self._side(units, "forward"), self._side(units, "backward")
            forward.ops.update(of.forward)
            backward.ops.update(of.backward)
            added = list(self._added(trace, ops, call, reading, fused.piece_of.get(at)))
            backward.ops.update(added)
            graph = self.graph_of.get((trace.index, call.name))
            forward.capture(graph, len(of.forward))
            backward.capture(graph, len(of.backward) + len(added))
            self._side(units, "weights").ops.update(of.of_weights)
            if of.of_weights:
                self._puts_aside(ops, call, units, of.puts_aside)
            sent, back = self.messages.of(call, trace.index, of.of_held)
            forward.messages.update(sent)
            backward.messages.update(back)

    def _puts_aside(self, ops: OpsOf, call: Call, units: Units, gradient: Size) -> None:
        """A deferred product holds the gradient of its result and its saved tensors; equal products each hold their
        own.
        """
        unit = next(iter(units), 0)
        self.aside[unit] = self.aside.get(unit, Size()).plus(gradient).plus(ops.kept(call)).plus(ops.hidden(call))

    def _added(
        self, trace: StageTrace, ops: OpsOf, call: Call, reading: dict[int, list[int | None]], piece: int | None
    ) -> Iterator[Op]:
        """A gradient that is added to another, of a value that is read twice. ``piece``: sums what its calls give."""
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

    def _into_buffers(self) -> None:
        """The gradient of each weight is added to its buffer, once a stage."""
        place, parts = self.decisions.mesh.place(0), self.decisions.expert_parts
        for name, units in self.homes.of_placeholder.items():
            node = self.decisions.program.node(name)
            is_held = name not in parts or parts[name].is_held(self.decisions.mesh.ep, 0)
            if name in self.decisions.program.parameters and node.meta["grad"] and units and is_held:
                stage = self.decisions.stages.parameter_stages[name][0]
                held = local_parameter(self.decisions, node, stage, place)
                size = prod(held.shape) * (held.dtype.itemsize + 2 * self._gradient_size(held.dtype))
                op = Op(str(held.dtype).removeprefix("torch."), Size(float(size)))
                self._side(units, "backward").ops[op] += 1

    def _gradient_size(self, dtype: torch.dtype) -> int:
        return main_gradient_size(self.spec, dtype)

    def _again(
        self, kind: str, trace: StageTrace, pieces: Sequence[Piece], homes: list[Units], found: list[CallOps]
    ) -> None:
        rerun = {(c.name, c.changed) for piece in pieces if piece.stage == trace.index for c in piece.again}
        if not rerun:
            return
        for call, units, of in zip(trace.calls, homes, found, strict=True):
            if (call.name, call.changed) in rerun:
                side = self._side(units[:1], f"again {kind}")
                side.ops.update(of.forward)
                side.messages.update(self.messages.again(call, trace.index))

    def _memory(self, kind: str, trace: StageTrace, ops: OpsOf, pieces: Sequence[Piece]) -> None:
        keeping = Keeping(trace, ops, self.homes, self.micro, self.after, let_go_of(trace, pieces))
        keeping.run()
        for unit, kept in keeping.units.items():
            self.kept[kind, unit] = kept
        known = set(self.loose)
        self.loose += [item for item in loose_of(kind, keeping) if item.maker >= 0 or item not in known]

    # ---- parameters, and values sent between stages

    def held(self) -> tuple[dict[int, Counter[HeldParameter]], dict[int, int], list[Tied]]:
        """The parameters of each unit, bytes of the model's own buffers, and parameters that several units read."""
        mesh, program = self.decisions.mesh, self.decisions.program
        place, parts = mesh.place(0), self.decisions.expert_parts
        own: dict[int, Counter[HeldParameter]] = {}
        buffers: Counter[int] = Counter()
        tied: list[Tied] = []
        for name, units in self.homes.of_placeholder.items():
            node = program.node(name)
            if not units or (name in parts and not parts[name].is_held(mesh.ep, 0)):
                continue
            if name in program.parameters:
                stage = self.decisions.stages.parameter_stages[name][0]
                held = self._parameter(local_parameter(self.decisions, node, stage, place))
                if len(units) > 1:
                    tied.append(Tied(program.parameters[name], units, held))
                for unit in units if len(units) == 1 else ():
                    own.setdefault(unit, Counter())[held] += 1
            elif name in program.buffers or name in program.constants:
                if len(units) > 1:
                    tied.append(Tied(name, units, None, value_bytes(node)))
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
        """For each unit, the values that are sent if a stage ends with it."""
        decisions, found = self.decisions, []
        for names in self.homes.live:
            values = []
            for name in names:
                node = decisions.program.node(name)
                value = value_at(decisions, name, sent_type(decisions.placements.of(node)))
                size = Size.of(value.bytes, self.micro, follows=name in self.follows)
                values.append(Crossing(size, value.requires_grad))
            found.append(tuple(values))
        return [*found, ()]

    # ---- the result

    def work(self, kinds: Sequence[str]) -> CutWork:
        own, buffers, tied = self.held()
        crossing, shared = self.crossing(), list[Shared]()
        of_unit: dict[tuple[int, str], Phase] = {}
        for (units, direction), side in self.sides.items():
            if len(units) == 1:
                of_unit[units[0], direction] = side.phase(is_captured=self.is_captured)
        for units in dict.fromkeys(units for units, _ in self.sides if len(units) > 1):
            sides = [self.sides.get((units, d), _Side()) for d in ("forward", "backward", "weights")]
            phases = [side.phase(is_captured=self.is_captured) for side in sides]
            shared.append(Shared(units, *phases))
        made: dict[UnitWork, UnitWork] = {}
        units = []
        for number in range(self.homes.num_units):
            of_kinds = {kind: self._kind(number, kind, of_unit) for kind in kinds}
            parameters = tuple(own.get(number, Counter()).items())
            forward = of_unit.get((number, "forward"), Phase())
            unit = UnitWork(forward, of_kinds, parameters, crossing[number], buffers[number])
            units.append(made.setdefault(unit, unit))
        loose = tuple(self.loose)
        return CutWork(
            tuple(units),
            self.micro,
            tuple(kinds),
            tuple(shared),
            loose,
            tuple(tied),
            self.decisions.num_noted,
            self.reads_global_sums,
            self.ends,
        )

    @property
    def reads_global_sums(self) -> bool:
        """Whether forwards of their own count sums for the loss, once a rank runs several microbatches."""
        program = self.decisions.program
        reads = any(program.graph.graph.find_nodes(op="call_function", target=over_data))
        return reads and self.spec.batch.statistics == GLOBAL

    def _kind(self, number: int, kind: str, of_unit: Mapping[tuple[int, str], Phase]) -> KindWork:
        kept = self.kept.get((kind, number), Kept())
        return KindWork(
            of_unit.get((number, "backward"), Phase()),
            of_unit.get((number, f"again {kind}"), Phase()),
            kept.kept,
            kept.kept_of_previous,
            kept.logits,
            tuple(kept.forward_over),
            tuple(kept.backward_over),
            tuple(kept.backward_apart),
            of_unit.get((number, "weights"), Phase()),
            self.aside.get(number, Size()),
        )


def main_gradient_size(spec: Spec, dtype: torch.dtype) -> int:
    """Bytes of one element of the buffer of gradients."""
    if spec.precision.gradients is not None:
        return getattr(torch, spec.precision.gradients).itemsize
    return max(4, dtype.itemsize)
