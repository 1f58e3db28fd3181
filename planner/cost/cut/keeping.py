"""Memory of a stage by unit: tensors that each makes and saves, and those that live while it runs.

The trace is run at its own size and at twice as many sequences, so that each figure splits into a part proportional to
the batch and a constant part. Temporaries of ops scale as their results do, gradients of weights are constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.cost.cut.homes import Homes, Units
from planner.cost.cut.kernels import NOTHING, Size
from planner.cost.cut.ops import OpsOf
from planner.cost.cut.units import Loose
from planner.cost.let_go import LetGo
from planner.cost.liveness import backward_live, forward_live, held_between
from planner.saved.observe import Like
from planner.saved.trace import Call, StageTrace

Live = tuple[int, int]  # the number of a call, and bytes


@dataclass
class Kept:
    """Of one unit, as units.KindWork has it."""

    kept: Size = NOTHING
    kept_of_previous: Size = NOTHING
    logits: Size = NOTHING
    forward_over: list[Size] = field(default_factory=list)
    backward_over: list[Size] = field(default_factory=list)
    backward_apart: list[Size] = field(default_factory=list)


class Keeping:
    """The tensors that one stage saves under one kind of recompute."""

    def __init__(
        self, trace: StageTrace, ops: OpsOf, homes: Homes, micro: int, after: frozenset[str], let_go: Sequence[LetGo]
    ) -> None:
        self.trace, self.ops, self.homes, self.micro, self.after, self.let_go = trace, ops, homes, micro, after, let_go
        self.units: dict[int, Kept] = {}
        self.loose: list[tuple[int, Units, Size]] = []
        found = [homes.of_call(call) for call in trace.calls]
        here = {units[0] for units in found if len(units) == 1}
        self.of_call = [tuple(u for u in units if u in here) or units for units in found]
        self.is_shared = [len(units) > 1 for units in found]  # by units of this stage, or of others
        self.first = min(here, default=0)

    def run(self) -> None:
        held, _ = held_between(self.trace, self.let_go)
        self._kept_memory(held)
        self._hidden()
        self._logits()
        self._live()

    def _of(self, unit: int) -> Kept:
        return self.units.setdefault(unit, Kept())

    def _size(self, memory: int) -> Size:
        return Size.of(self.trace.bytes_of[memory], self.micro, follows=self.ops.memory_follows[memory])

    def _kept_memory(self, held: set[int]) -> None:
        trace, received = self.trace, set(self.trace.received.values())
        maker: dict[int, Units] = {}
        keepers: dict[int, set[int]] = {}
        shared = set[int]()
        for call, units, is_shared in zip(trace.calls, self.of_call, self.is_shared, strict=True):
            for memory in call.makes:
                shared |= {memory} if memory not in maker and is_shared else set()
                maker.setdefault(memory, units)
            for memory in call.keeps:
                keepers.setdefault(memory, set()).update(units)
        for block in self.let_go:
            units = self.of_call[block.end]
            for memory in block.sources:
                keepers.setdefault(memory, set()).update(units)
        for memory in sorted(held - received - trace.outside):
            by = tuple(sorted(keepers.get(memory, ()))) or maker[memory]
            self._add(maker.get(memory, by), by, self._size(memory), memory in shared)

    def _add(self, maker: Units, by: Units, size: Size, is_shared: bool = False) -> None:
        if is_shared:
            self.loose.append((-1, by, size))
        elif by[0] <= maker[0]:
            self._of(maker[0]).kept = self._of(maker[0]).kept.plus(size)
        elif by[0] == maker[0] + 1:
            self._of(by[0]).kept_of_previous = self._of(by[0]).kept_of_previous.plus(size)
        else:
            self.loose.append((maker[0], by[:1], size))

    def _hidden(self) -> None:
        inside = {at for block in self.let_go for at in block.inside}
        for at, (call, units) in enumerate(zip(self.trace.calls, self.of_call, strict=True)):
            if call.hidden and at not in inside:
                self._add(units[:1], units[:1], self.ops.hidden(call))

    def _logits(self) -> None:
        """Tensors saved after the last block, counted as planner.cost.liveness counts them."""
        last = [call for call in self.trace.calls if not call.names.isdisjoint(self.after)]
        if not last:
            return
        made = {m for call in last for m in call.makes}
        earlier = {m for call in self.trace.calls if call.names.isdisjoint(self.after) for m in call.makes}
        kept = {m for call in last for m in call.keeps} & (made - earlier) - self.trace.outside
        total = Size()
        for memory in kept:
            total = total.plus(self._size(memory))
        for call in last:
            total = total.plus(self.ops.hidden(call))
        self._of(self.homes.num_units - 1).logits = total

    # ---- memory that lives at once

    def _live(self) -> None:
        twice = _scaled(self.trace, self.ops)
        runs = []
        for trace in (self.trace, twice):
            held, kept = held_between(trace, self.let_go)
            runs.append(
                (list(forward_live(trace, held, self.let_go)), list(backward_live(trace, held, kept, self.let_go)))
            )
        (forward, backward), (forward2, backward2) = runs
        apart = self._tied_gradients()
        self._tell("forward_over", forward, forward2, {})
        self._tell("backward_over", backward, backward2, {})
        self._tell("backward_apart", backward, backward2, apart)

    def _tell(self, name: str, one: list[Live], two: list[Live], less: dict[int, int]) -> None:
        bases: dict[int, Size] = {}
        found: dict[int, set[Size]] = {}
        for (at, most), (_, more) in zip(one, two, strict=True):
            unit = self.of_call[at][0]
            per = (more - most) / self.micro
            base = bases.setdefault(unit, self._before(unit))
            fixed = most - per * self.micro - base.fixed - less.get(at, 0)
            found.setdefault(unit, set()).add(Size(fixed, per - base.per))
        for unit, sizes in found.items():
            setattr(self._of(unit), name, envelope(sizes))

    def _tied_gradients(self) -> dict[int, int]:
        """Call → bytes of gradients of weights that a later unit made, and an earlier one has still to add to."""
        found: dict[int, int] = {}
        reading: dict[int, list[int]] = {}
        making: dict[int, int] = {}  # the last that does: a gradient that is summed in place is none
        for at, call in enumerate(self.trace.calls):
            for number, makes in self._weights_of(call):
                reading.setdefault(number, []).append(at)
                if makes:
                    making[number] = at
        for number, last in making.items():
            calls = reading[number]
            if self.of_call[calls[0]][0] != self.of_call[last][0]:
                for at in range(calls[0] + 1, last):
                    found[at] = found.get(at, 0) + self.trace.values[number].like.bytes
        return found

    def _weights_of(self, call: Call) -> Iterator[tuple[int, bool]]:
        """Values of weights that a call reads, and whether its backward makes their gradient."""
        gradients = call.seen.gradients or (None,) * len(call.operands)
        for number, gradient in zip(call.operands, gradients, strict=True):
            value = self.trace.values[number]
            if value.memory in self.trace.outside and value.like.requires_grad:
                yield number, gradient is not None or not call.seen.gradients

    def _before(self, unit: int) -> Size:
        """The saved tensors of the stage's units before this one, and its received values, as its sums count them."""
        total = Size()
        for memory in dict.fromkeys(self.trace.received.values()):
            total = total.plus(self._size(memory))
        for number, kept in self.units.items():
            if number < unit:
                total = total.plus(kept.kept)
                total = total.plus(kept.kept_of_previous) if number > self.first else total
        for maker, units, size in self.loose:
            if units[0] < unit and maker < unit:
                total = total.plus(size)
        return total


def envelope(sizes: set[Size]) -> list[Size]:
    """The sizes that are the largest for some microbatch."""
    kept: list[Size] = []
    for size in sorted(sizes, key=lambda s: (-s.per, -s.fixed)):
        if not kept or size.fixed > kept[-1].fixed:
            kept.append(size)
    return kept


def _scaled(trace: StageTrace, ops: OpsOf) -> StageTrace:
    """The trace for twice as many sequences."""
    sizes = [n * 2 if follows else n for n, follows in zip(trace.bytes_of, ops.memory_follows, strict=True)]
    cache: dict[object, Call] = {}
    values = [
        replace(v, like=_twice(v.like)) if ops.size_follows(v.number) else v for v in trace.values
    ]  # fmt: skip
    calls = [_scaled_call(call, trace, ops, cache) for call in trace.calls]
    return replace(trace, bytes_of=sizes, calls=calls, values=values)


def _twice(like: Like) -> Like:
    step = like.bytes // like.dtype.itemsize
    return replace(like, shape=(2, *like.shape), strides=(step, *like.strides))


def _scaled_call(call: Call, trace: StageTrace, ops: OpsOf, cache: dict[object, Call]) -> Call:
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


def loose_of(kind: str, keeping: Keeping) -> Iterator[Loose]:
    """The parts that no single unit has."""
    for maker, units, size in keeping.loose:
        yield Loose(kind, maker, units, size)
