"""A stage on one rank, call by call: which memory each call reads, makes and keeps for its backward.

    TraceCall("softmax_3", reads (7,), makes (9,), keeps (9,))        memory 9 has bytes_of[9] bytes

The lowered program is traced (planner.trace.lowered), and each op runs on tensors without values: the plan's bytes
are those of the ops that run. A memory is a number: views of one tensor share it. Parameters, buffers, constants and
batches are ``outside``: a stage does not own them. Each kind of call runs once, so that equal blocks cost a look in a
dictionary.
"""

import operator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import fx

from passes.base import StageGraph, ops_of
from passes.errors import require
from passes.moe.domain import domain_of, in_domain, share_of_rows
from passes.ops import meeting
from passes.ops.axis import AxisHandle
from passes.ops.meeting import grouped_linear
from passes.partition.type_changes import TypeChange
from passes.program.ops.aten import has_gradient
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.sharding.shards import Shards
from planner.trace.handles import planned, without_stream
from planner.trace.observe import Like, Made, Operand, Seen, observe


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as one rank holds it, its number, and which memory it lies in."""

    like: Like
    memory: int
    number: int


@dataclass(frozen=True, slots=True)
class TraceCall:
    """``name``: of the captured value that it gives, or of the value with the ``changed`` type. Memory by number.

    ``node``: of the lowered stage. ``ops``: captured names of the ops that it computes: none for a change of type
    alone, several if lowering made one op of them (a product and its bias, f and the products after it).
    ``hidden``: bytes of each saved tensor outside the graph. ``operands``, ``results``: numbers of values.
    ``overwrites``: memory that it reads and leaves other values in.
    """

    name: str
    node: fx.Node
    ops: tuple[str, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    keeps: tuple[int, ...]
    hidden: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    seen: Seen
    changed: TypeChange | None = None
    overwrites: tuple[int, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Return all captured names that the call stands for."""
        return frozenset((self.name, *self.ops))


@dataclass(frozen=True, slots=True)
class LetGo:
    """The freed memory of one recomputed block. ``end``: the number of its last call. ``reads``: of the last call with
    a backward that reads freed memory. ``memory`` that is freed, and ``inside``: calls with freed hidden tensors;
    ``sources`` are held for the rerun. ``again``: numbers of the calls of the rerun.
    """

    end: int
    reads: int
    memory: frozenset[int]
    sources: frozenset[int]
    inside: frozenset[int]
    again: tuple[int, ...]


@dataclass
class StageTrace:
    """Calls in their order. ``bytes_of`` memory; ``received`` and ``sent`` by name of the value.

    ``memory_of``: of each value of the captured graph, in the type in which this stage has it (a tuple's first).
    ``saved_again``: memory that compiled pieces of recomputed blocks keep; ``let_go``: of these blocks, in their order.
    """

    index: int
    calls: list[TraceCall] = field(default_factory=list)
    bytes_of: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    received: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    memory_of: dict[str, int] = field(default_factory=dict)
    saved_again: frozenset[int] = frozenset()
    let_go: tuple[LetGo, ...] = ()
    unseen: list[str] = field(default_factory=list)  # calls that could not be looked at: all operands count as kept

    def new(self, size: int, *, outside: bool = False) -> int:
        self.bytes_of.append(size)
        number = len(self.bytes_of) - 1
        if outside:
            self.outside.add(number)
        return number

    def value(self, like: Like, memory: int) -> Value:
        self.values.append(Value(like, memory, len(self.values)))
        return self.values[-1]

    @property
    def kept(self) -> dict[int, int]:
        """Return memory that autograd saves of one microbatch, each once → bytes; without ``hidden``."""
        found = dict.fromkeys(m for call in self.calls for m in call.keeps if m not in self.outside)
        return {memory: self.bytes_of[memory] for memory in found}

    @property
    def hidden(self) -> int:
        """Return bytes of saved tensors that are no value of the graph."""
        return sum(sum(call.hidden) for call in self.calls)


def trace_of(decisions: Decisions, shards: Shards, stage: StageGraph) -> StageTrace:
    return _Tracer(decisions, shards, stage).run()


# How many rows there are follows the routing: none of these runs without values.
OF_ROUTING = {
    meeting.meet,
    *meeting.MOVING,
    meeting.grouped_mm,
    meeting.part,
    meeting.ends_of,
    meeting.ids_of,
    grouped_linear,
}


class _Tracer:
    """Owns the trace while it grows. ``held``: of each node of the lowered graph its value, several, or a handle."""

    def __init__(self, decisions: Decisions, shards: Shards, stage: StageGraph) -> None:
        self.decisions, self.shards, self.stage = decisions, shards, stage
        self.trace = StageTrace(stage.index)
        self.held: dict[fx.Node, Any] = {}

    def run(self) -> StageTrace:
        received = {boundary.name: boundary for boundary in self.shards.received(self.stage.index)}
        for node in self.stage.graph.nodes:
            if node.op == "placeholder" and node.name in received:
                boundary = received[node.name]
                like = Like.contiguous(boundary.shape, getattr(torch, boundary.dtype), boundary.requires_grad)
                value = self.trace.value(like, self.trace.new(boundary.bytes))
                self.trace.received[boundary.name] = value.memory
                self._put(node, value)
            elif node.op == "get_attr" and "origin" not in node.meta:
                self.held[node] = planned(getattr(self.stage.root, str(node.target)))
            elif node.op in ("placeholder", "get_attr"):
                self._put(node, self._outside(node))
            elif node.target is operator.getitem:
                source: Any = node.args
                self._put(node, self.held[source[0]][source[1]])
            elif node.op == "call_function":
                self._put(node, self._called(node))
        self._sent()
        return self.trace

    def _put(self, node: fx.Node, value: Any) -> None:
        self.held[node] = value
        first: Value | None = value[0] if isinstance(value, tuple) else value
        if first is not None and "change" not in node.meta:
            self.trace.memory_of[node.meta["origin"]] = first.memory

    def _outside(self, node: fx.Node) -> Value:
        held = node.meta["val"]
        trainable = bool(node.meta.get("parameter")) and bool(node.meta["grad"])
        like = Like.contiguous(self._shape(node, tuple(held.shape)), held.dtype, trainable)
        return self.trace.value(like, self.trace.new(like.bytes, outside=True))

    def _sent(self) -> None:
        output = self.stage.graph.output_node()
        values: Any = output.args[0]
        of_name = dict(zip(output.meta["names"], values, strict=True))
        for boundary in self.shards.sent(self.stage.index):
            self.trace.sent[boundary.name] = self.held[of_name[boundary.name]].memory

    def _called(self, node: fx.Node) -> Any:
        operands: list[Value] = []

        def number_of(value: Value) -> Operand:
            if value not in operands:
                operands.append(value)
            return Operand(operands.index(value))

        def operand(source: fx.Node) -> Any:
            held = self.held[source]
            if isinstance(held, tuple):
                return tuple(number_of(v) for v in held)
            return number_of(held) if isinstance(held, Value) else held

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)  # pyright: ignore
        likes = [v.like for v in operands]
        if node.meta.get("grad") is False:  # no gradient reaches it: it has no backward, and keeps nothing for one
            likes = [replace(like, requires_grad=False) for like in likes]
        seen = self._observed(node, tuple(args), dict(kwargs), likes)
        if seen is None:
            seen = self._unseen(node, operands)
            self.trace.unseen.append(node.meta["origin"])
        made = self._record(node, _unread_inside(node, seen), operands)
        return tuple(made) if seen.is_tuple else made[0] if made else None

    def _observed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], likes: list[Like]) -> Seen | None:
        """Return None for an op that cannot run without values, such as one with sizes that depend on them."""
        if node.target in OF_ROUTING:
            return None
        given = without_stream(node.target, args)
        exchanges = any(isinstance(a, AxisHandle) for a in args)
        try:
            on_gpu, cudnn = self.decisions.on_gpu, self.decisions.cudnn
            seen = observe(node.target, given, kwargs, likes, on_gpu=on_gpu, cudnn=cudnn)  # pyright: ignore
        except Exception:  # whatever an op, or a user's function, says of tensors without values
            require(not exchanges, f"{node.name} exchanges, and does not run on tensors without values")
            return None
        both_ways = bool(seen.gradients) or not any(like.requires_grad for like in likes)
        require(both_ways or not exchanges, f"the backward of {node.name} does not run on tensors without values")
        return seen

    def _record(self, node: fx.Node, seen: Seen, operands: list[Value]) -> list[Value]:
        made: list[Value] = []
        for result in seen.made:
            made.append(self.trace.value(result.like, self._memory(result, operands, made)))
        keeps = [operands[n].memory for n in seen.operands] + [made[n].memory for n in seen.results]
        change = node.meta.get("change")
        name = node.meta["origin"] if change is None else change.value
        reads = tuple(dict.fromkeys(v.memory for v in operands))
        makes = tuple(dict.fromkeys(v.memory for v in made))
        kept = tuple(dict.fromkeys(keeps))
        numbers = tuple(v.number for v in operands), tuple(v.number for v in made)
        overwrites = tuple(dict.fromkeys(operands[n].memory for n in seen.overwritten))
        of_call = TraceCall(
            name, node, ops_of(node), reads, makes, kept, seen.hidden, *numbers, seen, change, overwrites
        )
        self.trace.calls.append(of_call)
        return made

    def _memory(self, result: Made, operands: list[Value], made: list[Value]) -> int:
        if result.shares is None:
            return self.trace.new(result.bytes)
        return operands[result.shares].memory if result.shares >= 0 else made[-1 - result.shares].memory

    def _unseen(self, node: fx.Node, operands: list[Value]) -> Seen:
        """Return new memory of the planned shapes. If the result has a gradient, floating-point operands are saved, but
        of rows that move only their order.
        """
        grad = bool(node.meta.get("grad"))
        held = node.meta.get("val")
        values = held if isinstance(held, (tuple, list)) else (held,) if isinstance(held, torch.Tensor) else ()
        likes = [Like.contiguous(self._shape(node, tuple(v.shape)), v.dtype, grad) for v in values]
        made = tuple(Made(like, None, like.bytes) for like in likes)
        if grad and node.target in meeting.MOVING:
            rows = likes[0].shape[0] if node.target in meeting.SENDING else operands[0].like.shape[0]
            return Seen(made, is_tuple=False, hidden=(rows * torch.int64.itemsize,))
        keeps = tuple(n for n, v in enumerate(operands) if has_gradient(v.like.dtype)) if grad else ()
        return Seen(made, isinstance(held, (tuple, list)), keeps)

    def _shape(self, node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        placement: Placement = node.meta["placement"]
        domain, mesh = domain_of(node), self.decisions.mesh
        if domain is None:
            return placement.local_shape(shape, mesh.tp)
        local = list(in_domain(node, placement.local_shape(shape, mesh.etp), mesh))
        if domain.rows >= 0:
            local[domain.rows] = ceil(local[domain.rows] * share_of_rows(node, mesh) * self.decisions.fullest)
        return tuple(local)


def _unread_inside(node: fx.Node, seen: Seen) -> Seen:
    """A result that is kept and that no node takes out of the tuple, as the indices of a top-k of which only the values
    are read, lies inside the op: it has no name in the graph."""
    if not seen.is_tuple or any(user.target is not operator.getitem for user in node.users):
        return seen
    read = [user.args[1] for user in node.users]
    shared = {-1 - result.shares for result in seen.made if result.shares is not None and result.shares < 0}
    inside = [n for n in seen.results if n not in read and n not in shared and seen.made[n].shares is None]
    if not inside:
        return seen
    made = tuple(replace(result, bytes=0) if n in inside else result for n, result in enumerate(seen.made))
    results = tuple(n for n in seen.results if n not in inside)
    return replace(seen, made=made, results=results, hidden=(*seen.hidden, *(seen.made[n].bytes for n in inside)))
