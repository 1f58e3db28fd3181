"""Bytes on one rank of each pipeline rank, by category, before anything is allocated.

    parameters, gradients   elements of the local shards · bytes of their dtype
    optimizer               per element: two moments, a float32 main parameter under a half-precision one, a float32
                            gradient under a half-precision one; over d data-parallel ranks: divided by d under ZeRO-1
    activations             what autograd keeps of one microbatch · microbatches in flight

    parameters, gradients     not sharded     ZeRO-1
    half, half                    20          4 + 16/d
    half, float32                 18          6 + 12/d
    float32, float32              16          8 + 8/d

Parameters, gradients and optimizer are exact up to the padding of the buffers. Activations are an ESTIMATE: which
operands each op saves for its backward is read off a short table; workspaces and the allocator's slack are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

import torch
from torch import fx

from planner.decisions import Decisions
from planner.errors import require
from planner.graph.ops.aten import is_view, tensors_of
from planner.graph.program import Program
from planner.pipeline.schedule import SchedulePlan
from planner.pipeline.stages import StageAssignment
from planner.placement.types import I, Placement
from planner.regions.static_memory import GraphSlots
from planner.sharding.parameters import parameters_of_rank
from planner.sharding.shards import Shards
from planner.spec.spec import Spec

aten = torch.ops.aten

# What the backward of an op reads of its forward; an op in no table reads all its operands.
_READS_NOTHING = {
    aten.add,
    aten.sub,
    aten.neg,
    aten.sum,
    aten.mean,
    aten.to,
    aten.clone,
    aten.cat,
    aten.expand,
    aten.roll,
    aten.constant_pad_nd,
    aten.pad,
    aten.dropout,
    aten.slice_scatter,
    aten.select_scatter,
    aten.copy,
    aten.cross_entropy_loss,
}
_READS_RESULT = {
    aten.softmax,
    aten._softmax,
    aten.log_softmax,
    aten._log_softmax,
    aten.tanh,
    aten.sigmoid,
    aten.exp,
    aten.relu,
    aten.rsqrt,
    aten.sqrt,
    aten.reciprocal,
}
_READS_THE_OTHER = {aten.mul, aten.linear, aten.mm, aten.bmm, aten.matmul}
_READS_ONLY = {aten.where: 0, aten.embedding: 1, aten.masked_fill: 1, aten.gather: 2, aten.index_select: 2}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes on one rank of ``pp_rank``. ``total`` is their sum; left out, it is filled in."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    graph_buffers: int = 0
    total: int = -1

    def __post_init__(self) -> None:
        total = self.parameters + self.gradients + self.optimizer + self.activations + self.graph_buffers
        if self.total == -1:
            object.__setattr__(self, "total", total)
        require(self.total == total, f"memory of pp rank {self.pp_rank}: {self.total} is not the sum {total}")


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """Sizes on one of ``tp`` ranks. ``types``: node or placeholder name → its type; absent ones are held whole."""

    tp: int = 1
    types: Mapping[str, Placement] = field(default_factory=dict)

    def bytes(self, node: fx.Node) -> int:
        placement = self.types.get(node.name, I)
        return sum(prod(placement.local_shape(tuple(t.shape), self.tp)) * t.element_size() for t in tensors_of(node))

    def num_elements(self, node: fx.Node) -> int:
        return prod(self.types.get(node.name, I).local_shape(tuple(node.meta["val"].shape), self.tp))


def optimizer_bytes(parameter: torch.dtype, gradient: torch.dtype) -> int:
    """Bytes of AdamW's state for one element, over all the ranks that share it."""
    moment = max(parameter.itemsize, 4)
    main_parameter = 4 if parameter.itemsize < 4 else 0
    main_gradient = 4 if gradient.itemsize < 4 else 0
    return 2 * moment + main_parameter + main_gradient


def memory_of_ranks(
    program: Program,
    stages: StageAssignment,
    pp: int,
    in_flight: Sequence[int],
    *,
    num_shards: int = 1,
    zero: int = 1,
    local: LocalSizes | None = None,
    parameter_dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[MemoryRow, ...]:
    """One row for each pp rank.

    ``in_flight``: per rank the most (microbatch, chunk) pairs between forward and backward (``pipeline.simulate``).
    ``num_shards``: data-parallel ranks that share the optimizer's state. Dtypes None: parameters as captured, gradients
    as their parameter.
    """
    local = local or LocalSizes()
    rows = []
    for rank in range(pp):
        chunks = range(rank, stages.num_stages, pp)
        held = parameters_of(program, stages, chunks)
        parameters, gradients, optimizer = _parameter_bytes(held, local, parameter_dtype, gradient_dtype)
        kept = sum(
            bytes_of(program, stages, stage, local)
            for stage in chunks
            for bytes_of in (activation_bytes, boundary_bytes)
        )
        rows.append(
            MemoryRow(
                rank,
                parameters + _buffer_bytes(program, stages, chunks),
                gradients,
                ceil(optimizer / num_shards) if zero else optimizer,
                ceil(kept * in_flight[rank] / len(chunks)),
            )
        )
    return tuple(rows)


def parameters_of(program: Program, stages: StageAssignment, held: Sequence[int]) -> list[fx.Node]:
    """The parameters that some stage of ``held`` reads, each once (a tied one may have several placeholders)."""
    read = {
        fqn: name for name, fqn in program.parameters.items() if not set(stages.parameter_stages[name]).isdisjoint(held)
    }
    return [program.node(name) for name in read.values()]


def boundary_bytes(program: Program, stages: StageAssignment, stage: int, local: LocalSizes) -> int:
    """Bytes of one microbatch's values that ``stage`` receives; it keeps them until its backward."""
    received = stages.live[stage - 1] if stage else ()
    return sum(local.bytes(program.node(name)) for name in received)


def activation_bytes(program: Program, stages: StageAssignment, stage: int, local: LocalSizes) -> int:
    """Bytes that autograd keeps of one microbatch of ``stage``, received values aside."""
    kept, hidden = set[fx.Node](), 0
    received = stages.live[stage - 1] if stage else ()
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and node.meta["grad"] and stages.runs_on(node.name, stage) and not is_view(node):
            kept.update(_memory_of(value) for value in _saved(node))
            hidden += _hidden_bytes(node, local)
    return hidden + sum(local.bytes(n) for n in kept if n.op == "call_function" and n.name not in received)


def _parameter_bytes(
    parameters: Sequence[fx.Node],
    local: LocalSizes,
    parameter_dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None,
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and (undivided) optimizer state; what is frozen has only the first."""
    held = gradients = optimizer = 0
    for node in parameters:
        num_elements, dtype = local.num_elements(node), parameter_dtype or node.meta["val"].dtype
        held += num_elements * dtype.itemsize
        if node.meta["grad"]:
            gradients += num_elements * (gradient_dtype or dtype).itemsize
            optimizer += num_elements * optimizer_bytes(dtype, gradient_dtype or dtype)
    return held, gradients, optimizer


def _buffer_bytes(program: Program, stages: StageAssignment, held: Sequence[int]) -> int:
    local = LocalSizes()
    return sum(
        local.bytes(program.node(name))
        for name in (*program.buffers, *program.constants)
        if not set(stages.parameter_stages[name]).isdisjoint(held)
    )


def _saved(node: fx.Node) -> Iterator[fx.Node]:
    """The values that the backward of ``node`` reads."""
    packet, operands = getattr(node.target, "overloadpacket", None), node.all_input_nodes
    if packet in _READS_RESULT:
        yield node
    elif packet in _READS_ONLY:
        yield from (n for n in operands if n is node.args[_READS_ONLY[packet]])
    elif packet in _READS_THE_OTHER:
        yield from _read_for_the_other(node)
    elif packet is aten.div:
        yield from operands if len(operands) > 1 else ()
    elif packet not in _READS_NOTHING:
        yield from operands
        if packet is aten.scaled_dot_product_attention:
            yield node


def _read_for_the_other(node: fx.Node) -> Iterator[fx.Node]:
    """In a product each operand is read for the other's gradient: a factor of a constant is not kept."""
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    for i, operand in enumerate(operands):
        if any(other.meta["grad"] for j, other in enumerate(operands) if j != i):
            yield operand


def _hidden_bytes(node: fx.Node, local: LocalSizes) -> int:
    """What an op keeps that is no node: a dropout's mask (a byte an element), the log-probabilities of the loss."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.dropout:
        return local.num_elements(node)
    return local.bytes(node.all_input_nodes[0]) if packet is aten.cross_entropy_loss else 0


def _memory_of(node: fx.Node) -> fx.Node:
    """The value whose memory a view shows."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


# ---- with the buffers that the runtime allocates


def memory_rows(
    spec: Spec, decisions: Decisions, shards: Shards, schedule: SchedulePlan, slots: Sequence[GraphSlots] = ()
) -> tuple[MemoryRow, ...]:
    """Estimated activations; parameters, gradients and optimizer as the buffers hold them, all padding included.

    ``graph_buffers``: the static inputs, outputs and gradients of all slots of what CUDA graphs capture.
    """
    mesh = decisions.mesh
    local = LocalSizes(mesh.tp, {name: option.out for name, option in decisions.placements.options.items()})
    rows = memory_of_ranks(
        decisions.program,
        decisions.stages,
        mesh.pp,
        schedule.peak_in_flight,
        num_shards=mesh.dp,
        zero=spec.optimizer.zero,
        local=local,
    )
    static = Counter[int]()
    for row in slots:
        static[row.pp_rank] += row.bytes
    return tuple(replace(_exact(decisions, shards, row), graph_buffers=static[row.pp_rank], total=-1) for row in rows)


def _exact(decisions: Decisions, shards: Shards, row: MemoryRow) -> MemoryRow:
    buffers = shards.buffers_of_rank(row.pp_rank)
    held = parameters_of_rank(decisions, row.pp_rank)
    frozen = sum(prod(p.shape) * p.dtype.itemsize for p in held if not p.requires_grad)
    return replace(
        row,
        total=-1,
        parameters=frozen
        + _registered_bytes(decisions, row.pp_rank)
        + sum(b.layout.num_elements * b.dtype.itemsize for b in buffers),
        gradients=sum(b.layout.num_elements * b.gradient_dtype.itemsize for b in buffers),
        optimizer=sum(b.optimizer_bytes for b in buffers),
    )


def _registered_bytes(decisions: Decisions, rank: int) -> int:
    """The model's own buffers and constants on each stage of a rank."""
    program, stages, local = decisions.program, decisions.stages, LocalSizes()
    return sum(
        local.bytes(program.node(name)) * sum(s % decisions.mesh.pp == rank for s in stages.parameter_stages[name])
        for name in (*program.buffers, *program.constants)
        if name in stages.parameter_stages
    )
