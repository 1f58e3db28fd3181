"""The memory of any stage that is part of a traced one, by the same walk as for a plan (planner.cost.liveness).

    stage = blocks a b b b c        traced: a b c        walked: a b c, b c and c

A part is the calls of consecutive units of one trace, with the values that cross its ends. A unit that stands for
several equal blocks is walked once: each further copy adds the saved bytes of (b c) minus those of (c), from its
forward to its backward; tensors that wait for a W are alive during the backwards of earlier units.

A trace is walked at its own size and with twice as many sequences, to split each figure into a part proportional to the
batch and a constant part. Temporaries of ops scale with their results; weight gradients are constant.

A unit is a block with the calls that are anchored to it. A call that every stage with a reader computes (masks, rotary
tables) belongs to the units of its readers, and so does a conversion, except of partial sums: it belongs to the unit
that computes them, because they are reduced before they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from passes.blocks.live_sets import (
    before_and_after_blocks,
    live_values,
    needed_anchors,
    recomputed_nodes,
    stages_of_copies,
)
from passes.partition.type_changes import TypeChange
from planner.cost.cut.ops import OpsOf, made_of, waiting_calls
from planner.cost.cut.units import Size
from planner.cost.liveness import Walked, walked
from planner.decisions import Decisions
from planner.pipeline.ledger import StageBytes
from planner.trace.observe import Like
from planner.trace.trace import LetGo, StageTrace, TraceCall

Live = tuple[int, int]  # index of a call, and bytes
Units = tuple[int, ...]
_NOWHERE = fx.Graph().placeholder("nowhere")


class Homes:
    """The units of each call of a program. ``ends``: the calls before all blocks, and after them, are units too."""

    def __init__(self, decisions: Decisions, *, ends: bool = False) -> None:
        program, block_of = decisions.program, decisions.blocks.block_of()
        self.program, self.num_units = program, max(1, len(decisions.blocks.instances))
        self.anchor = needed_anchors(program, block_of, recomputed_nodes(program))
        if ends:
            before, after = before_and_after_blocks(self.anchor, block_of, self.num_units - 1)
            shifted = {node: 0 if node in before else unit + 1 for node, unit in self.anchor.items()}
            self.anchor = shifted | dict.fromkeys(sorted(after), self.num_units + 1)
            self.num_units += 2
        self._of_node: dict[str, Units] = {node.name: (unit,) for node, unit in self.anchor.items()}
        for node, units in stages_of_copies(program, self.anchor).items():
            self._of_node.setdefault(node.name, units)

    def of_name(self, name: str) -> Units:
        return self._of_node.get(name, ()) or (0,)

    def of_call(self, call: TraceCall) -> Units:
        return self.of_name(call.name) if call.changed is None else self.of_change(call.changed)

    def of_change(self, change: TypeChange) -> Units:
        if change.before.kind == "P":
            return self.of_name(change.value)
        units = {u for name in change.readers if name not in ("send", "loss") for u in self.of_name(name)}
        return tuple(sorted(units)) if units else self.of_name(change.value)[-1:]

    @cached_property
    def live(self) -> tuple[tuple[str, ...], ...]:
        """For each boundary between two units, the values that cross it."""
        return live_values(self.anchor, self.num_units)

    @cached_property
    def of_placeholder(self) -> dict[str, Units]:
        """Return parameter, buffer or constant → the units that read it."""
        nodes = (n for n in self.program.graph.graph.nodes if n.op == "placeholder")
        return {node.name: self._of_node.get(node.name, ()) for node in nodes}


def following(program_nodes: list[fx.Node], inputs: set[str], flow: dict[fx.Node, frozenset[int] | None]) -> set[str]:
    """Return the names of the values with a size proportional to the sequences of a microbatch.

    They exclude values that are expanded to the batch size without reading the batch, as masks may be.
    """
    names, on_batch = set[str](), set[fx.Node]()
    for node in program_nodes:
        if node.name in inputs or any(n in on_batch for n in node.all_input_nodes):
            on_batch.add(node)
            dims = flow.get(node)
            value: Any = node.meta.get("val")
            sizes = value if isinstance(value, (tuple, list)) else (value,)
            numel = sum(int(v.numel()) for v in sizes if hasattr(v, "numel"))
            if numel > 1 and (dims is None or dims):
                names.add(node.name)
    return names


@dataclass(frozen=True)
class Scaled:
    """A traced stage of ``units`` under one kind of recomputation: its trace, and that with twice as many sequences.
    ``homes``: units of each call; ``crossing``: memory of the values that cross the end of each unit; ``deferred``:
    indices of the calls with weight gradients that a W may compute.
    """

    units: range
    traces: tuple[StageTrace, StageTrace]
    homes: Sequence[Units]
    crossing: Sequence[Mapping[str, int]]
    deferred: frozenset[int]

    @classmethod
    def of(cls, trace: StageTrace, ops: OpsOf, homes: Homes, units: range) -> Scaled:
        summed = {c.name: c.makes[0] for c in trace.calls if c.changed is not None and c.changed.before.kind == "P"}
        memory_of = trace.memory_of | summed
        own = {name: memory for name, memory in memory_of.items() if memory not in trace.outside}
        crossing = [{name: own[name] for name in live if name in own} for live in homes.live]
        # without nodes, because the work of a cut outlives the graphs
        once = replace(trace, calls=[replace(call, node=_NOWHERE) for call in trace.calls])
        of_calls = [tuple(n for n in homes.of_call(call) if n in units) for call in trace.calls]
        return cls(units, (once, _twice(once, ops)), of_calls, [*crossing, {}], waiting_calls(trace))

    def part(self, first: int, end: int, trace: StageTrace) -> tuple[StageTrace, list[int]]:
        """Return the trace of units [first, end), and the indices of its calls in the full trace."""
        numbers = [at for at, units in enumerate(self.homes) if any(first <= unit < end for unit in units)]
        calls, new = [trace.calls[at] for at in numbers], {at: n for n, at in enumerate(numbers)}
        received, sent = trace.received, trace.sent
        if first > self.units.start:
            made = made_of(calls)
            read = {str(m): m for call in calls for m in call.reads if m not in made}
            enters = self.crossing[first - 1].values()
            received = {name: m for name, m in read.items() if m not in trace.outside} | {str(m): m for m in enters}
        if end < self.units.stop:
            sent = dict(self.crossing[end - 1])
        let_go = tuple(_renumbered(block, new) for block in trace.let_go if _first_of(block) in new)
        return replace(trace, calls=calls, received=received, sent=sent, let_go=let_go), numbers


def _first_of(block: LetGo) -> int:
    """Return a call in the block's own unit; its last one may be a conversion that belongs to the next unit."""
    return block.again[0] if block.again else min(block.end, block.reads)


def _renumbered(block: LetGo, new: Mapping[int, int]) -> LetGo:
    """Renumber a block for a part of its trace, which may lack the conversion of the block's result."""
    end, reads = (new[max(at for at in new if at <= last)] for last in (block.end, block.reads))
    inside, again = frozenset(new[at] for at in block.inside), tuple(new[at] for at in block.again if at in new)
    return replace(block, end=end, reads=reads, inside=inside, again=again)


class Part(NamedTuple):
    """The memory of a stage in which each unit occurs once. ``forward``, ``backward``: for each unit, sizes with the
    peak bytes as their maximum.
    """

    bytes: tuple[Size, ...]
    forward: Mapping[int, Sequence[Size]]
    backward: Mapping[int, Sequence[Size]]

    def at(self, micro: int) -> StageBytes:
        return StageBytes(*(size.at(micro) for size in self.bytes))


@dataclass(frozen=True)
class Parts:
    """The traced ``stages`` of a cut, by kind of recomputation. ``micro``: sequences of the traces; ``after``: names of
    the calls after the last block; ``known``: cached parts.
    """

    micro: int
    after: frozenset[str]
    stages: dict[str, list[Scaled]] = field(default_factory=dict)
    known: dict[tuple[str, int, int, bool], Part] = field(default_factory=dict)

    def stage(self, kind: str, units: Sequence[int], micro: int, waits: bool) -> StageBytes:
        """Return the bytes of a stage of these ascending ``units``. ``waits``: weight gradients wait for a W."""
        first, end, copies = units[0], units[-1] + 1, Counter(units)
        part = self._part(kind, first, end, waits)
        of, saved, aside = part.at(micro), dict.fromkeys(range(first, end), 0.0), dict.fromkeys(range(first, end), 0.0)
        for unit in (unit for unit in range(first, end) if copies[unit] > 1):
            both, last = (self._part(kind, at, unit + 2, waits).at(micro) for at in (unit, unit + 1))
            saved[unit] = (copies[unit] - 1) * (both.kept - last.kept)
            aside[unit] = (copies[unit] - 1) * (both.aside - last.aside)
        kept, before, behind = of.kept + sum(saved.values()), 0.0, sum(aside.values())
        forward = backward = kept
        for unit in range(first, end):
            own, behind = before + saved[unit], behind - aside[unit]
            forward = max([forward, *(own + size.at(micro) for size in part.forward.get(unit, ()))])
            beside = behind + max(own, before + aside[unit])
            backward = max([backward, *(beside + size.at(micro) for size in part.backward.get(unit, ()))])
            before = own
        return of._replace(kept=kept, forward=forward, backward=backward, aside=of.aside + sum(aside.values()))

    def _part(self, kind: str, first: int, end: int, waits: bool) -> Part:
        key = kind, first, end, waits
        if key not in self.known:
            self.known[key] = self._walked(*key)
        return self.known[key]

    def _walked(self, kind: str, first: int, end: int, waits: bool) -> Part:
        of = next(of for of in self.stages[kind] if first in of.units and end - 1 in of.units)
        walks = list[Walked]()
        for trace in of.traces:
            part, numbers = of.part(first, end, trace)
            later = frozenset(n for n, at in enumerate(numbers) if at in of.deferred) if waits else frozenset[int]()
            walks.append(walked(part, self.after, later))
        one, two = walks
        units = [next(unit for unit in of.homes[at] if first <= unit < end) for at in numbers]  # pyright: ignore
        sizes = tuple(self._size(*pair) for pair in zip(one.bytes, two.bytes, strict=True))
        return Part(sizes, self._most(units, one.forward, two.forward), self._most(units, one.backward, two.backward))

    def _most(self, units: Sequence[int], one: Sequence[Live], two: Sequence[Live]) -> dict[int, list[Size]]:
        by_unit: dict[int, set[Size]] = {}
        for (at, most), (_, more) in zip(one, two, strict=True):
            by_unit.setdefault(units[at], set()).add(self._size(most, more))
        return {unit: envelope(sizes) for unit, sizes in by_unit.items()}

    def _size(self, one: float, two: float) -> Size:
        return Size(2 * one - two, (two - one) / self.micro)


def envelope(sizes: set[Size]) -> list[Size]:
    """Return the sizes that are the largest for some number of sequences."""
    kept: list[Size] = []
    for size in sorted(sizes, key=lambda s: (-s.per, -s.fixed)):
        if not kept or size.fixed > kept[-1].fixed:
            kept.append(size)
    return kept


def _twice(trace: StageTrace, ops: OpsOf) -> StageTrace:
    """Return the trace for twice as many sequences."""
    sizes = [n * 2 if follows else n for n, follows in zip(trace.bytes_of, ops.memory_follows, strict=True)]
    values = [replace(v, like=_doubled(v.like)) if ops.size_follows(v.number) else v for v in trace.values]
    calls = [_call_twice(call, ops) for call in trace.calls]
    return replace(trace, bytes_of=sizes, calls=calls, values=values)


def _doubled(like: Like) -> Like:
    step = like.bytes // like.dtype.itemsize
    return replace(like, shape=(2, *like.shape), strides=(step, *like.strides))


def _call_twice(call: TraceCall, ops: OpsOf) -> TraceCall:
    seen, follows = call.seen, call.name in ops.follows
    if not follows and not any(ops.size_follows(n) for n in call.operands):
        return call
    gradients = tuple(
        replace(g, bytes=g.bytes * (2 if ops.size_follows(n) else 1)) if g is not None else None
        for g, n in zip(seen.gradients, call.operands, strict=False)
    )
    own = [(g, n) for g, n in zip(seen.gradients, call.operands, strict=False) if g is not None and not g.is_given]
    fixed = min(sum(g.bytes for g, n in own if not ops.size_follows(n)), seen.backward_peak)
    peak = seen.peak * 2 if follows else seen.peak
    more = replace(seen, peak=peak, gradients=gradients, backward_peak=2 * seen.backward_peak - fixed)
    hidden = tuple(n * 2 for n in call.hidden)
    return replace(call, seen=more, hidden=hidden)
