"""A stage on one rank, call by call: which memory each call reads, makes and keeps for its backward.

    Call("softmax_3", reads (7,), makes (9,), keeps (9,))        memory 9 has bytes_of[9] bytes

A memory is a number: views of one tensor share it. Parameters, buffers, constants and batches are ``outside``: a stage
does not own them. Only shapes are computed, each kind of call once, so that equal blocks cost a look in a dictionary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import fx

from passes.moe.domain import domain_of, in_domain, is_here, share_of_rows
from passes.partition.type_changes import TypeChange, sent_type, type_at
from passes.program.ops.groups import WITH_WEIGHT
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.saved import stand_ins
from planner.saved.fused import is_fused_bias, is_overlapped, is_summed_in_place
from planner.saved.local_calls import ON_GPU, local_call
from planner.saved.observe import Like, Made, Operand, Seen, observe
from planner.sharding.shards import Shards


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as one rank holds it, its number, and which memory it lies in."""

    like: Like
    memory: int
    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """``name``: of the captured node, or of the value with the ``changed`` type. Memory by number.

    ``hidden``: bytes of each saved tensor outside the graph. ``operands``, ``results``: numbers of values.
    ``in_place``: its result overwrites its first input, as in lowering (planner.saved.fused).
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    keeps: tuple[int, ...]
    hidden: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    seen: Seen
    changed: TypeChange | None = None
    in_place: bool = False


@dataclass
class StageTrace:
    """Calls in their order. ``bytes_of`` memory; ``received`` and ``sent`` by name of the value.

    ``stored``: numbers of the values outside as they are stored; a part sliced from one is another value.
    ``memory_of``: of each value of the captured graph, in the type in which this stage has it (a tuple's first).
    """

    index: int
    calls: list[Call] = field(default_factory=list)
    bytes_of: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    received: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    memory_of: dict[str, int] = field(default_factory=dict)
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
        """Memory that autograd saves of one microbatch, each once → bytes; without ``hidden``."""
        found = dict.fromkeys(m for call in self.calls for m in call.keeps if m not in self.outside)
        return {memory: self.bytes_of[memory] for memory in found}

    @property
    def hidden(self) -> int:
        """Bytes of saved tensors that are no value of the graph."""
        return sum(sum(call.hidden) for call in self.calls)

    @property
    def kept_bytes(self) -> int:
        """All that autograd keeps of one microbatch."""
        return sum(self.kept.values()) + self.hidden


def trace_stage(decisions: Decisions, shards: Shards, index: int) -> StageTrace:
    """The trace of stage ``index`` on rank 0 of every axis but pp; the other ranks hold as much."""
    return _Tracer(decisions, shards, index).run()


class _Tracer:
    """Owns the trace while it grows, and the values of the stage: by name, and by name and type if it changes."""

    def __init__(self, decisions: Decisions, shards: Shards, index: int) -> None:
        self.decisions, self.shards, self.index = decisions, shards, index
        self.program, self.mesh = decisions.program, decisions.mesh
        self.trace = StageTrace(index)
        self.values: dict[str, Any] = {}
        self.changed: dict[tuple[str, Placement], Any] = {}
        self.parts: dict[int, int] = {}  # memory of a value that the backward gathers again → of its saved part
        self.copies: dict[int, int] = {}  # such memory → further bytes of gathering it and summing its gradient
        self.gathered_again = {name for exchange in decisions.context.exchanges for name in exchange.way}
        self.of_gathered = {exchange.reader for exchange in decisions.context.exchanges if exchange.reader}
        self.changes: dict[str, list[TypeChange]] = {}
        self.of_overlapped = set[str]()  # products that the op of their f or gather computes
        for change in shards.changes[index]:
            self.changes.setdefault(change.value, []).append(change)
            if change.how.name in ("f", "gather") and is_overlapped(decisions, change):
                self.of_overlapped |= set(change.readers)

    def run(self) -> StageTrace:
        for boundary in self.shards.received(self.index):
            like = Like.contiguous(boundary.shape, getattr(torch, boundary.dtype), boundary.requires_grad)
            value = self.trace.value(like, self.trace.new(boundary.bytes))
            self.trace.received[boundary.name] = value.memory
            self._put(self.program.node(boundary.name), value)
        for node in self._nodes():
            if node.op == "placeholder":
                self._put(node, self._outside(node))
            elif node.target is operator.getitem:
                source: Any = node.args
                self._put(node, self._value(source[0], node)[source[1]])
            else:
                self._put(node, self._called(node))
        for boundary in self.shards.sent(self.index):
            node = self.program.node(boundary.name)
            sent = self.changed.get(
                (boundary.name, sent_type(self.decisions.placements.of(node))), self.values[boundary.name]
            )
            self.trace.sent[boundary.name] = sent.memory
        return self.trace

    def _nodes(self) -> Iterator[fx.Node]:
        stages, received = self.decisions.stages, {b.name for b in self.shards.received(self.index)}
        for node in self.program.graph.graph.nodes:
            if node.op == "placeholder":
                if self.index in stages.parameter_stages.get(node.name, ()):
                    yield node
            elif node.op == "call_function" and node.name not in received and stages.runs_on(node.name, self.index):
                mine = is_here(node, self.mesh, 0)
                yield from (node,) if mine else ()

    def _put(self, node: fx.Node, value: Any) -> None:
        """A value, and all the types that it is changed to right after."""
        self.values[node.name] = value
        first: Value | None = value[0] if isinstance(value, tuple) else value
        if first is None:
            return
        self.trace.memory_of[node.name] = first.memory
        for change in self.changes.get(node.name, ()):
            self.changed[node.name, change.after] = self._change(node, first, change)

    def _outside(self, node: fx.Node) -> Value:
        held = node.meta["val"]
        shape = self._local_shape(node)
        trainable = bool(node.meta.get("parameter")) and bool(node.meta["grad"])
        like = Like.contiguous(shape, held.dtype, trainable)
        value = self.trace.value(like, self.trace.new(like.bytes, outside=True))
        self.trace.stored.add(value.number)
        return value

    def _change(self, node: fx.Node, value: Value, change: TypeChange) -> Value:
        size = self.mesh.etp if change.axis == "etp" else self.mesh.tp
        args: Any = (Operand(0), self._way(node, change), change.before, change.after, size)
        if domain_of(node) is not None:  # how many rows there are follows the routing
            args = (Operand(0), "g", change.before, change.before, 1)
        seen = observe(stand_ins.converted, args, {}, [value.like])
        in_place = change.how.name == "g" and is_summed_in_place(self.decisions, node, change, self.index)
        (made,) = self._record(node, seen, [value], change, in_place)
        if change.again:
            self.parts[made.memory], self.copies[made.memory] = value.memory, _copies(change.before, value, made)
        return made

    def _way(self, node: fx.Node, change: TypeChange) -> str:
        """The conversion, as peephole rewrites leave it."""
        name = change.how.name
        if name == "f" and is_overlapped(self.decisions, change):
            return "f overlapped"
        return name

    def _value(self, node: Any, reader: fx.Node) -> Any:
        """A value in the type in which ``reader`` wants it."""
        position = reader.all_input_nodes.index(node)
        wanted = self.decisions.placements.wanted(reader, position)
        return self.changed.get((node.name, wanted), self.values[node.name])

    def _called(self, node: fx.Node) -> Any:
        operands: list[Value] = []

        def operand(value: fx.Node) -> Any:
            if value.name not in self.values:  # of an expert of another rank
                return None
            held = self._value(value, node)
            if isinstance(held, tuple):
                return tuple(number_of(v) for v in held)
            return number_of(held)

        def number_of(value: Value) -> Operand:
            if value not in operands:
                operands.append(value)
            return Operand(operands.index(value))

        option = self.decisions.placements.options[node.name]
        shape = self._local_shape(node) if isinstance(node.meta["val"], torch.Tensor) else ()
        call = local_call(node, option, self.decisions.placements.size(node), shape)
        target, args, kwargs = call or (None, node.args, node.kwargs)
        if self.decisions.on_gpu and target in ON_GPU:
            target, kwargs = ON_GPU[target](kwargs)
        given: Any = fx.map_arg((args, kwargs), operand)
        seen = None if target is None else _observed(target, given[0], given[1], [v.like for v in operands])
        if seen is None:
            seen = self._unseen(node, operands)
            self.trace.unseen.append(node.name)
        made = self._record(node, seen, operands, None, is_fused_bias(self.decisions, node))
        if node.name in self.gathered_again:
            self.parts[made[0].memory] = self.parts.get(operands[0].memory, operands[0].memory)
        return tuple(made) if seen.is_tuple else made[0] if made else None

    def _record(
        self, node: fx.Node, seen: Seen, operands: list[Value], change: TypeChange | None, in_place: bool = False
    ) -> list[Value]:
        seen = _unread_inside(node, seen)
        if change is None and node.name in self.of_gathered:  # it saves its operands, and no copy that a product makes
            seen = replace(seen, operands=tuple(range(len(operands))), hidden=())
        if change is None and node.name in self.of_overlapped and seen.hidden:  # likewise, if its weight trains
            seen = replace(seen, operands=tuple(sorted({0, *seen.operands})), hidden=())
        made: list[Value] = []
        for result in seen.made:
            made.append(self.trace.value(result.like, self._memory(result, operands, made)))
        keeps = [self.parts.get(operands[n].memory, operands[n].memory) for n in seen.operands]
        keeps += [made[n].memory for n in seen.results]
        if any(value.memory in self.parts for value in operands):  # it is gathered once more in the backward
            again = dict.fromkeys(v.memory for v in operands if v.memory in self.parts)
            copies = sum(self.copies.get(memory, 2 * self.trace.bytes_of[memory]) for memory in again)
            seen = replace(seen, backward_peak=seen.backward_peak + copies)
        if change is None and self._adds_in_place(node, operands):
            seen = _without_gradient(seen, 1)
        reads = tuple(dict.fromkeys(v.memory for v in operands))
        makes = tuple(dict.fromkeys(v.memory for v in made))
        numbers = tuple(v.number for v in operands), tuple(v.number for v in made)
        kept = tuple(dict.fromkeys(keeps))
        self.trace.calls.append(Call(node.name, reads, makes, kept, seen.hidden, *numbers, seen, change, in_place))
        return made

    def _adds_in_place(self, node: fx.Node, operands: list[Value]) -> bool:
        """Whether the gradient of the second operand is added into its buffer by the product itself
        (passes.own_linears).
        """
        if node.target not in WITH_WEIGHT or len(operands) != 2 or node.kwargs:
            return False
        x, weight = operands
        is_alike = weight.like.dtype not in (torch.bfloat16, torch.float16)  # the buffer's may be wider
        is_held = weight.number in self.trace.stored and x.memory not in self.trace.outside
        return is_alike and is_held and x.like.requires_grad and weight.like.requires_grad

    def _memory(self, result: Made, operands: list[Value], made: list[Value]) -> int:
        if result.shares is None:
            return self.trace.new(result.bytes)
        return operands[result.shares].memory if result.shares >= 0 else made[-1 - result.shares].memory

    def _unseen(self, node: fx.Node, operands: list[Value]) -> Seen:
        """New memory of the planned shapes; floating-point operands are saved if the result has a gradient."""
        grad = bool(node.meta.get("grad"))
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        likes = [Like.contiguous(self._shape(node, tuple(v.shape)), v.dtype, grad) for v in values]
        made = tuple(Made(like, None, like.bytes) for like in likes)
        keeps = tuple(n for n, v in enumerate(operands) if v.like.dtype.is_floating_point) if grad else ()
        return Seen(made, isinstance(node.meta["val"], (tuple, list)), keeps)

    def _local_shape(self, node: fx.Node) -> tuple[int, ...]:
        return self._shape(node, tuple(int(n) for n in node.meta["val"].shape))

    def _shape(self, node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        placement = type_at(self.decisions.placements, self.decisions.stages, node, self.index)
        domain = domain_of(node)
        if domain is None:
            return placement.local_shape(shape, self.mesh.tp)
        local = list(in_domain(node, placement.local_shape(shape, self.mesh.etp), self.mesh))
        if domain.rows >= 0:
            local[domain.rows] = ceil(local[domain.rows] * share_of_rows(node, self.mesh))
        return tuple(local)


def _copies(cut: Placement, part: Value, whole: Value) -> int:
    """Bytes that live at once beside the gradient of ``whole``, in the backward of products that gather it again
    (passes.ops.column_linear): the gathered value, that gradient with each rank's part behind the others', and the sum.
    Along dim 0 parts lie behind each other anyway."""
    lies_so = cut.dim == 0 and len(cut.segments) == 1 and not cut.padding
    return (1 if lies_so else 2) * whole.like.bytes + part.like.bytes


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


def _without_gradient(seen: Seen, number: int) -> Seen:
    """The same call without memory for the gradient of an operand."""
    if number >= len(seen.gradients) or (gradient := seen.gradients[number]) is None:
        return seen
    gradients = tuple(None if n == number else of for n, of in enumerate(seen.gradients))
    return replace(seen, gradients=gradients, backward_peak=seen.backward_peak - gradient.bytes)


def _observed(target: Any, args: Any, kwargs: dict[str, Any], operands: list[Like]) -> Seen | None:
    """None for an op that cannot be run without values, such as one with sizes that depend on them."""
    try:
        return observe(target, args, kwargs, operands)
    except Exception:  # whatever an op, or a user's function, says of tensors without values
        return None
