"""A piece as calls on memory: the memory that may be freed or must be kept, and the cost of each rerun call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from passes.moe.exchange import EXCHANGES, REPEATABLE
from passes.partition.type_changes import type_at
from passes.pieces import FULL, Key, Piece, PieceHomes
from passes.program.ops.own_backward import OwnBackward
from passes.rules.flops import FLOPS_PER_BYTE, node_flops
from planner.decisions import Decisions
from planner.trace.trace import StageTrace, TraceCall


@dataclass(frozen=True)
class Scene:
    """The calls of one stage, with the piece (``home``) of each."""

    decisions: Decisions
    trace: StageTrace
    homes: PieceHomes

    @cached_property
    def home(self) -> list[Piece | None]:
        homes, calls = self.homes, self.trace.calls
        return [homes.of_call(c.name) if c.changed is None else homes.of_change(c.changed) for c in calls]

    @cached_property
    def elsewhere(self) -> Mapping[int, set[int | None]]:
        """Memory → the pieces (None: outside of all pieces) with calls that read or save it."""
        return self._pieces_by(lambda call: (*call.reads, *call.keeps))

    @cached_property
    def kept_by(self) -> Mapping[int, set[int | None]]:
        """Memory → the pieces with calls that save it for their backward."""
        return self._pieces_by(lambda call: call.keeps)

    def _pieces_by(self, memories_of: Callable[[TraceCall], tuple[int, ...]]) -> dict[int, set[int | None]]:
        pieces: dict[int, set[int | None]] = {}
        for call, home in zip(self.trace.calls, self.home, strict=True):
            for memory in memories_of(call):
                pieces.setdefault(memory, set()).add(None if home is None else home.index)
        return pieces

    @cached_property
    def weights(self) -> set[int]:
        memory_of = self.trace.memory_of
        return {memory_of[name] for name in self.decisions.program.parameters if name in memory_of}

    @cached_property
    def received(self) -> set[int]:
        return set(self.trace.received.values())

    @cached_property
    def leaving(self) -> set[int]:
        """Memory of the values that the stage sends, and of its loss."""
        loss = self.decisions.program.loss
        own = {self.trace.memory_of[loss]} if loss in self.trace.memory_of else set[int]()
        return own | set(self.trace.sent.values())

    def node(self, call: TraceCall) -> fx.Node:
        return self.decisions.program.node(call.name)

    @cached_property
    def keys(self) -> Mapping[int, set[Key]]:
        """Memory → the values of the captured graph, each in its type, that are stored in it."""
        keys: dict[int, set[Key]] = {}
        decisions, index = self.decisions, self.trace.index
        for name, memory in self.trace.memory_of.items():
            node = decisions.program.node(name)
            if node.op == "call_function":
                keys.setdefault(memory, set()).add((name, type_at(decisions.placements, decisions.stages, node, index)))
        for call in self.trace.calls:
            if call.changed is not None and not call.ops:
                for memory in call.makes:
                    keys.setdefault(memory, set()).add((call.name, call.changed.after))
        return keys


@dataclass
class Memories:
    """The memory of one piece. ``maker``: memory allocated in the piece → the call that allocates it; ``writers``: all
    calls with results in it, including views, in-place sums and overwrites.

    ``given``: memory from outside that its calls read. ``seen``: memory of the piece that other pieces read, so it is
    alive anyway. ``saved``: memory of the piece that only its own backward reads, so it may be freed.
    """

    scene: Scene
    piece: Piece
    calls: list[TraceCall] = field(default_factory=list)
    maker: dict[int, TraceCall] = field(default_factory=dict)
    writers: dict[int, list[TraceCall]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        scene, index = self.scene, self.piece.index
        self.calls = [c for c, home in zip(scene.trace.calls, scene.home, strict=True) if home is self.piece]
        for call in self.calls:
            self.given |= {m for m in call.reads if m not in self.maker}
            for memory in call.makes:
                if memory not in self.given and memory not in call.reads:
                    self.maker.setdefault(memory, call)
            for memory in self.written(call):
                self.writers.setdefault(memory, []).append(call)
        for memory in self.maker:
            others = scene.elsewhere.get(memory, set()) - {index}
            if others or memory in scene.leaving:
                self.seen.add(memory)
            elif index in scene.kept_by.get(memory, ()) and memory in scene.keys:  # without a name it stays
                self.saved.add(memory)

    def written(self, call: TraceCall) -> set[int]:
        """Return the memory of the piece that ``call`` writes."""
        return {memory for memory in (*call.makes, *call.overwrites) if memory in self.maker}

    @cached_property
    def lost(self) -> set[int]:
        """Memory that is overwritten and that no rerun restores: no rerun can read its earlier values."""
        lost = set[int]()
        for call in self.calls:
            lost |= {memory for memory in call.overwrites if not self._comes_again(memory, call, lost)}
        return lost

    def _comes_again(self, memory: int, by: TraceCall, lost: set[int]) -> bool:
        """Whether a rerun can allocate ``memory`` and repeat its overwrite; selective pieces keep it instead."""
        if self.piece.kind != FULL or memory not in self.maker or memory in self.seen:
            return False
        return not any(self._is_no_op(call) or not lost.isdisjoint(call.reads) for call in (self.maker[memory], by))

    def made(self, call: TraceCall) -> list[int]:
        return [memory for memory in dict.fromkeys(call.makes) if self.maker.get(memory) is call]

    def bytes(self, memory: int) -> int:
        return self.scene.trace.bytes_of[memory]

    def costs_to_keep(self, memory: int) -> int:
        """Return the bytes that keeping ``memory`` costs; 0 for memory that is alive anyway."""
        trace, scene = self.scene.trace, self.scene
        if memory in trace.outside or memory in self.seen or memory in scene.received:
            return 0
        if memory in self.given and scene.kept_by.get(memory):
            return 0
        return self.bytes(memory)

    # ---- calls

    def runs_once(self, call: TraceCall) -> bool:
        """Whether a call cannot be rerun: it is no PyTorch op (a few ops of experts can be), or reads lost values."""
        return self._is_no_op(call) or not self.lost.isdisjoint(call.reads)

    def _is_no_op(self, call: TraceCall) -> bool:
        node = self.scene.node(call)
        if node.target in REPEATABLE:
            return False
        own = isinstance(node.target, (torch._ops.OpOverload, OwnBackward))
        return call.changed is None and not own and not str(getattr(node.target, "__module__", "")).endswith("operator")

    def is_of_shape_alone(self, call: TraceCall) -> bool:
        """Whether the internal tensors of a call depend on shapes alone, like the mask of a dropout."""
        return call.changed is None and self.scene.node(call).target is torch.ops.aten.dropout.default

    def exchanges(self, call: TraceCall) -> bool:
        return self.scene.node(call).target in EXCHANGES or any(sent.phase == "forward" for sent in call.seen.sent)

    def flops(self, call: TraceCall) -> int:
        return sum(map(self.flops_of, call.ops))

    def flops_of(self, name: str) -> int:
        """Return the FLOPs of one op on one rank; tp divides them if an operand or the result is sharded."""
        decisions = self.scene.decisions
        option, size = decisions.placements.options[name], decisions.mesh.tp
        is_cut = any(t.is_sharded for t in (option.out, *option.args))
        return node_flops(decisions.program.node(name)) // (size if is_cut else 1)

    def moved(self, call: TraceCall) -> int:
        """Return the bytes that a call reads and writes; 0 for views."""
        made = self.made(call)
        return sum(map(self.bytes, (*dict.fromkeys(call.reads), *made))) if made else 0

    def cost(self, call: TraceCall) -> float:
        """Return the cost in FLOPs: of a product its own, of any other op the equivalent of the bytes that it moves."""
        return self.flops(call) or self.moved(call) * FLOPS_PER_BYTE


def closure(memories: Memories, needed: Sequence[int], insides: Sequence[TraceCall], kept: set[int]) -> list[TraceCall]:
    """Return the calls that recompute ``needed`` and rerun ``insides``, from given and kept memory, in order."""
    blank = [call for call in insides if memories.is_of_shape_alone(call)]
    reached: dict[int, TraceCall] = {}
    open_calls = [c for m in needed for c in memories.writers[m]] + [call for call in insides if call not in blank]
    while open_calls:
        call = open_calls.pop()
        if id(call) in reached:
            continue
        reached[id(call)] = call
        open_calls += [c for m in call.reads if m in memories.maker and m not in kept for c in memories.writers[m]]
    reached |= {id(call): call for call in blank}
    return [call for call in memories.calls if id(call) in reached]


def sources_of(memories: Memories, needed: Sequence[int], again: Sequence[TraceCall]) -> set[int]:
    """Return the memory that a rerun reads and does not allocate, without weights and batches."""
    made = {m for call in again for m in memories.made(call)}
    wanted = set(needed) | {m for call in again for m in call.reads}
    blank = [c for c in again if memories.is_of_shape_alone(c) and wanted.isdisjoint(memories.made(c))]
    read = {m for call in again if call not in blank for m in call.reads}
    return read - made - memories.scene.trace.outside
