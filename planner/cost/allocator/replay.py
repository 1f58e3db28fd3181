"""The allocator's slack of a rank, by replay: what PyTorch's allocator reserves for the tensors of a step beyond them.

    at the start     parameters, gradients, optimizer, static graph buffers: one block each
    F, B, W          the births and deaths of the stage's tensors in their order (planner.cost.liveness)
    messages         received into blocks that are allocated one action ahead; sent ones live until they are taken over
    slack            most reserved − most that lived

A step repeats itself: the replay ends once several backward actions have changed neither figure. Full weights and
gradients of sharded ones (``whole``) are not replayed: they keep the flat share. So do all tensors of a model with
routed experts, if that is more, because their sizes change from microbatch to microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from passes.pieces import CompiledPiece, Piece
from planner.cluster.cluster import Cluster
from planner.cost.allocator.caching import Block, CachingAllocator
from planner.cost.allocator.ledger import Event, Held
from planner.cost.device_memory import on_device
from planner.cost.fused_saves import with_fused_saves
from planner.cost.let_go import let_go_of
from planner.cost.liveness import StageEvents, stage_events
from planner.cost.memory import SLACK, MemoryRow, memory_rows, update_bytes, waiting_calls
from planner.fold import Fold, stage_of
from planner.pipeline.links import Message, Progress, received_by, sent_by
from planner.pipeline.schedule import Action, SchedulePlan
from planner.regions.static_memory import GraphSlots
from planner.saved.lowered import Lowered
from planner.saved.trace import OF_ROUTING

STEADY = 4  # backward actions of each chunk without a change, after which a step repeats itself


def rows_of_plan(
    lowered: Lowered,
    schedule: SchedulePlan,
    slots: Sequence[GraphSlots],
    recomputed: Sequence[Piece],
    compiled: Sequence[CompiledPiece],
    cluster: Cluster | None,
) -> tuple[MemoryRow, ...]:
    """The memory of each pp rank on a device of ``cluster``. On a GPU the slack is that of a replay."""
    mesh = lowered.decisions.mesh
    rows = on_device(memory_rows(lowered, schedule, slots, recomputed, compiled), mesh, cluster)
    if cluster is None or not cluster.device.is_gpu:
        return rows
    traces = [with_fused_saves(lowered.trace(index), compiled, recomputed) for index in range(lowered.num_stages)]
    stages = [
        stage_events(t, let_go_of(t, recomputed), waiting_calls(t) if schedule.has_weights else frozenset())
        for t in traces
    ]
    is_routed = any(call.node.target in OF_ROUTING for trace in traces for call in trace.calls)
    standing = {row.pp_rank for row in slots if row.message_bytes}
    room = int(cluster.device.memory * cluster.device.usable_memory)
    found = []
    for row in rows:
        rank = Replay(lowered, schedule, stages, row.pp_rank, room - row.device, row.pp_rank in standing)
        slack = rank.slack(row) + ceil(SLACK * row.whole)
        slack = max(slack, row.slack) if is_routed else slack
        found.append(replace(row, slack=slack, total=row.total - row.slack + slack))
    return tuple(found)


class _Place(NamedTuple):
    """A tensor of one microbatch on one stage, or (``kind`` "message") a value of a message."""

    stage: int
    microbatch: int
    held: Held


class Replay:
    """Owns the allocator of one pp rank, the blocks of live tensors, and the bytes of the messages under way.

    ``room``: bytes of the device for tensors. ``stands_still``: messages lie in static buffers.
    """

    def __init__(
        self,
        lowered: Lowered,
        schedule: SchedulePlan,
        stages: Sequence[StageEvents],
        rank: int,
        room: int | None = None,
        stands_still: bool = False,
    ) -> None:
        mesh, self.shards = lowered.decisions.mesh, lowered.shards
        self.decisions, self.pp, self.stages = lowered.decisions, mesh.pp, stages
        self.fold: Fold = mesh.fold
        self.order, self.rank, self.stands_still = schedule.actions[rank], rank, stands_still
        self.progress = Progress(schedule.actions, mesh.fold)
        self.allocator = CachingAllocator(room)
        self.blocks: dict[_Place, Block] = {}
        self.sizes: dict[_Place, int] = {}
        self.sending: dict[Message, list[_Place]] = {}
        self.live = self.most_live = 0

    def slack(self, row: MemoryRow) -> int:
        """Bytes; ``row``: that of this rank."""
        static = row.parameters, row.gradients, row.optimizer, row.graph_buffers
        for number, size in enumerate(static):
            self._birth(_Place(-1, -1, Held("static", number)), size)
        self._actions()
        update = _Place(-1, -1, Held("update", 0))
        if update_bytes(self.decisions, self.shards, self.rank):
            self._birth(update, update_bytes(self.decisions, self.shards, self.rank))
        return self.allocator.most_reserved - self.most_live

    def _actions(self) -> None:
        unchanged, known = 0, (0, 0)
        steady = STEADY * (1 + max(action.chunk for action in self.order))
        for at, action in enumerate(self.order):
            self._messages_before(action, self.order[at + 1 : at + 2])
            {"F": self._forward, "B": self._backward, "W": self._weights}[action.kind](action)
            now = (self.allocator.most_reserved, self.most_live)
            unchanged = 0 if now != known else unchanged + (action.kind == "B")
            known = now
            if unchanged == steady:
                break
        for place in [place for place in self.blocks if place.stage >= 0]:
            self._death(place)

    # ---- actions

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stage(action), action.microbatch
        events = self.stages[stage]
        is_handed = stage > 0 and not self._crosses(received_by("F", stage, microbatch))
        handed = self._take_over(stage, microbatch) if is_handed else frozenset[Held]()
        self._play(stage, microbatch, (event for event in events.forward if event.held not in handed))
        message = sent_by("F", stage, microbatch)
        if self._crosses(message):
            places = [_Place(stage, microbatch, held) for held in events.sent.values() if held not in events.kept]
            self.sending[message] = list(dict.fromkeys(p for p in places if p in self.blocks))

    def _take_over(self, stage: int, microbatch: int) -> frozenset[Held]:
        """The values that the stage before hands over on the same rank, without a copy: those that it keeps stay its
        own, the others have a new owner."""
        before, events = self.stages[stage - 1], self.stages[stage]
        for name, held in events.received.items():
            source, place = _Place(stage - 1, microbatch, before.sent[name]), _Place(stage, microbatch, held)
            if before.sent[name] not in before.kept and source in self.blocks:
                self.blocks[place], self.sizes[place] = self.blocks.pop(source), self.sizes.pop(source)
        return frozenset(events.received.values())

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stage(action), action.microbatch
        events = self.stages[stage]
        self._play(stage, microbatch, events.backward)
        message = sent_by("B", stage, microbatch)
        stays = set(events.aside)
        if self._crosses(message):
            self.sending[message] = [
                place for held in events.returned if (place := _Place(stage, microbatch, held)) in self.blocks
            ]
            stays |= set(events.returned)
        self._end(stage, microbatch, stays)

    def _weights(self, action: Action) -> None:
        at = self._stage(action), action.microbatch
        self._end(*at, (place.held for places in self.sending.values() for place in places if place[:2] == at))

    def _end(self, stage: int, microbatch: int, stays: Iterable[Held]) -> None:
        stays = set(stays)
        for place in [p for p in self.blocks if p[:2] == (stage, microbatch) and p.held not in stays]:
            self._death(place)

    def _play(self, stage: int, microbatch: int, events: Iterable[Event]) -> None:
        for held, size, is_birth in events:
            place = _Place(stage, microbatch, held)
            if not is_birth:
                self._death(place)
            elif place not in self.blocks:
                self._birth(place, size)

    # ---- messages

    def _messages_before(self, action: Action, following: Sequence[Action]) -> None:
        """Frees the sends that are taken over, and allocates the receives of the next action. Those of this action are
        born again, as its tensors, in the same blocks."""
        if action.kind != "W":
            received = received_by(action.kind, self._stage(action), action.microbatch)
            for sent in self.progress.taken_over(self.sending, received) if self._crosses(received) else ():
                for place in self.sending.pop(sent):
                    self._death(place)
        for later in following:
            for place, size in self._posted(later):
                self._birth(place, size)
        for place, _ in self._posted(action):
            self._death(place)

    def _posted(self, action: Action) -> list[tuple[_Place, int]]:
        """The blocks that are allocated ahead for an action."""
        if action.kind == "W":
            return []
        message = received_by(action.kind, self._stage(action), action.microbatch)
        if not self._crosses(message) or self.stands_still:
            return []
        values = [b for b in self.shards.sent(message.boundary) if message.kind == "F" or b.requires_grad]
        return [
            (_Place(message.boundary, message.microbatch, Held("message " + message.kind, number)), value.bytes)
            for number, value in enumerate(values)
        ]

    def _crosses(self, message: Message) -> bool:
        return message.crosses(len(self.stages), self.pp, self.fold)

    def _stage(self, action: Action) -> int:
        return stage_of(self.rank, action.chunk, self.pp, self.fold)

    # ---- blocks

    def _birth(self, place: _Place, size: int) -> None:
        if not size:
            return
        self.blocks[place], self.sizes[place] = self.allocator.allocate(size), size
        self.live += size
        self.most_live = max(self.most_live, self.live)

    def _death(self, place: _Place) -> None:
        block = self.blocks.pop(place, None)
        if block is not None:
            self.live -= self.sizes.pop(place)
            self.allocator.free(block)
