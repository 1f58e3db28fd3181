"""One forward and one backward of a stage on a rank, call by call: how many bytes live at once.

    forward     a value lives until its last reader, or until the backward where autograd keeps it
    backward    what is kept lives until the backward of its last keeper; a gradient from the first reader's backward on
                until that of the call that made the value

The order is that of autograd: later calls first. Received values live until the stage's backward is done. If weight
gradients wait for a W, the saved tensors of their products and the gradients of their results live until it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.let_go import LetGo
from planner.saved.observe import Gradient
from planner.saved.trace import Call, StageTrace


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one microbatch on a stage: ``kept`` between forward and backward, ``logits`` of them by the calls after
    the last block; at the peak of a ``forward`` and of a ``backward``, with the kept bytes included. ``aside``: bytes
    that a backward leaves for its W. ``received``: kept bytes that came from the stage before. ``passed_on``: kept
    bytes that the next stage receives.
    """

    kept: int
    logits: int
    forward: int
    backward: int
    sent: int = 0  # of values that go to the next stage, and are not saved
    at_forward: str = ""  # the call at the peak
    at_backward: str = ""
    aside: int = 0
    received: int = 0
    passed_on: int = 0

    def without(self, given: int) -> StageMemory:
        """The same without bytes that it receives and that are counted elsewhere."""
        kept, forward, backward = (total - given for total in (self.kept, self.forward, self.backward))
        return replace(self, kept=kept, forward=forward, backward=backward, received=self.received - given)


def stage_memory(
    trace: StageTrace,
    after_blocks: frozenset[str] = frozenset(),
    let_go: Sequence[LetGo] = (),
    later: frozenset[int] = frozenset(),
) -> StageMemory:
    """``after_blocks``: names of calls after the last block. ``let_go``: of recomputed blocks. ``later``: numbers of
    the calls with weight gradients that a W computes.
    """
    held, kept = held_between(trace, let_go)
    forward, at_forward = _most(trace, forward_live(trace, held, let_go))
    ran = _Backward(trace, held, kept, let_go, later)
    backward, at_backward = _most(trace, ran.run())
    logits = _kept_by_last(trace, after_blocks)
    sent = sum(trace.bytes_of[m] for m in set(trace.sent.values()) - held - trace.outside)
    received = sum(trace.bytes_of[m] for m in set(trace.received.values()) & held)
    passed_on = sum(trace.bytes_of[m] for m in set(trace.sent.values()) & held - trace.outside)
    peaks = (max(forward, kept), max(backward, kept), sent, at_forward, at_backward)
    return StageMemory(kept, logits, *peaks, ran.aside, received, passed_on)


def held_between(trace: StageTrace, let_go: Sequence[LetGo] = ()) -> tuple[set[int], int]:
    """Memory that is held between forward and backward, and its bytes, hidden tensors included."""
    held = set(trace.kept) | set(trace.received.values())
    for block in let_go:
        held = (held - block.memory) | block.sources
    inside = sum(sum(trace.calls[at].hidden) for block in let_go for at in block.inside)
    return held, sum(trace.bytes_of[m] for m in held) + trace.hidden - inside


def _most(trace: StageTrace, live: Iterable[tuple[int, int]]) -> tuple[int, str]:
    """The first of the largest, and the call that runs then."""
    peak, where = 0, ""
    for at, most in live:
        if most > peak:
            peak, where = most, trace.calls[at].name
    return peak, where


def backward_live(
    trace: StageTrace, held: set[int], kept: int, let_go: Sequence[LetGo] = ()
) -> Iterator[tuple[int, int]]:
    """Call by call, the last first: its number, and the most bytes that live while its backward runs."""
    return _Backward(trace, held, kept, let_go).run()


def _kept_by_last(trace: StageTrace, after_blocks: frozenset[str]) -> int:
    """Bytes saved by calls after the last block, without those saved earlier."""
    last = [call for call in trace.calls if not call.names.isdisjoint(after_blocks)]
    made = {m for call in last for m in call.makes} - {m for call in last for m in call.reads if m in trace.outside}
    earlier = {m for call in trace.calls if call.names.isdisjoint(after_blocks) for m in call.makes}
    kept = {m for call in last for m in call.keeps} & (made - earlier) - trace.outside
    return sum(trace.bytes_of[m] for m in kept) + sum(sum(call.hidden) for call in last)


def forward_live(trace: StageTrace, held: set[int], let_go: Sequence[LetGo] = ()) -> Iterator[tuple[int, int]]:
    """Call by call: its number, and the most bytes that live during its forward."""
    last_read = {m: at for at, call in enumerate(trace.calls) for m in (*call.reads, *call.makes)}
    last_read |= {m: block.end for block in let_go for m in block.memory}
    ends = {block.end: block for block in let_go}
    stays = held | trace.outside | set(trace.sent.values())
    alive: set[int] = set(trace.received.values())
    live = sum(trace.bytes_of[m] for m in alive)
    for at, call in enumerate(trace.calls):
        most = live + call.seen.peak
        new = [m for m in call.makes if m not in alive and m not in trace.outside]
        alive.update(new)
        live += sum(trace.bytes_of[m] for m in new) + sum(call.hidden)
        yield at, max(most, live)
        read = {*call.reads, *call.makes}
        if at in ends:
            read |= ends[at].memory
            live -= sum(sum(trace.calls[number].hidden) for number in ends[at].inside)
        for m in read:
            if last_read[m] == at and m not in stays and m in alive:
                alive.discard(m)
                live -= trace.bytes_of[m]


def _rerun(trace: StageTrace, block: LetGo) -> int:
    """The most bytes that are made and live at once while a block is recomputed."""
    calls = [trace.calls[at] for at in block.again]
    last_read = {m: at for at, call in enumerate(calls) for m in (*call.reads, *call.makes)}
    alive, made, live, peak = set[int](), {m for call in calls for m in call.makes}, 0, 0
    made -= block.sources | trace.outside
    for at, (number, call) in enumerate(zip(block.again, calls, strict=True)):
        new = [m for m in call.makes if m in made and m not in alive]
        peak = max(peak, live + call.seen.peak)
        alive.update(new)
        live += sum(trace.bytes_of[m] for m in new) + (sum(call.hidden) if number in block.inside else 0)
        peak = max(peak, live)
        for m in {*call.reads, *call.makes} & alive:
            if last_read[m] == at and m not in block.memory:
                alive.discard(m)
                live -= trace.bytes_of[m]
    return peak


class _Backward:
    """Owns the gradients that wait: of each value the memory that its gradient lies in, and how many lie there."""

    def __init__(
        self,
        trace: StageTrace,
        held: set[int],
        kept: int,
        let_go: Sequence[LetGo],
        later: frozenset[int] = frozenset(),
    ) -> None:
        self.trace, self.later = trace, later
        self.kept_aside: set[int] = set()
        self.given_aside: set[int] = set()
        self.hidden_aside: set[int] = set()  # numbers of calls
        self.rerun_at = {block.reads: block for block in let_go}
        self.sizes: list[int] = []
        self.owners = Counter[int]()
        self.gradient_of: dict[int, int] = {}
        self.live = kept
        self.keepers = Counter(m for call in trace.calls for m in call.keeps)
        self.keepers.update(m for block in let_go for m in block.sources)  # the rerun frees them
        self.received = set(trace.received.values())
        self.first_reader = {v: at for at, call in reversed(list(enumerate(trace.calls))) for v in call.operands}

    def run(self) -> Iterator[tuple[int, int]]:
        self._start()
        for at in reversed(range(len(self.trace.calls))):
            call = self.trace.calls[at]
            again = self._run_again(self.rerun_at[at]) if at in self.rerun_at else 0
            yield at, max(again, self._call(at, call))

    def _start(self) -> None:
        """Gradients of sent values come from the next stage; that of the loss is one number."""
        sent = set(self.trace.sent.values())
        for value in self.trace.values:
            if value.memory in sent and value.like.requires_grad and value.memory not in self.trace.outside:
                sent.discard(value.memory)
                self._give(value.number, self._new(self.trace.bytes_of[value.memory]))
        last = next((c for c in reversed(self.trace.calls) if c.results), None)
        if last is not None and not self.trace.sent:
            for number in last.results:
                self._give(number, self._new(self.trace.values[number].like.bytes))

    def _call(self, at: int, call: Call) -> int:
        """The most bytes that live while the backward of ``call`` runs."""
        given = [self.gradient_of.get(number) for number in call.results]
        if at in self.later:
            self._put_aside(at, call, given)
        first = next((g for g in given if g is not None), None)
        most = self.live
        gradients = self._gradients(call)
        overwrites = first is not None and any(g is not None and g.is_kept for g in gradients)
        if overwrites:  # its saved tensor lives on as a gradient
            self._release(at, call)
        if first is not None:
            most += call.seen.backward_peak
            for number, gradient in zip(call.operands, gradients, strict=True):
                if gradient is not None:
                    self._give(number, first if gradient.is_given else self._new(gradient.bytes))
        most = max(most, self.live)
        for number in call.results:
            self._drop(number)
        for number in call.operands:  # a parameter's gradient goes into its buffer once all its readers are done
            if self.trace.values[number].memory in self.trace.outside and self.first_reader[number] == at:
                self._drop(number)
        if not overwrites:
            self._release(at, call)
        return most

    @property
    def aside(self) -> int:
        """Bytes that are put aside so far."""
        kept = sum(self.trace.bytes_of[m] for m in self.kept_aside)
        hidden = sum(sum(self.trace.calls[at].hidden) for at in self.hidden_aside)
        return kept + hidden + sum(self.sizes[g] for g in self.given_aside)

    def _put_aside(self, at: int, call: Call, given: Sequence[int | None]) -> None:
        """A deferred call holds its saved tensors, and the gradients of its results, beyond this backward."""
        self.hidden_aside.add(at)
        for memory in given:
            if memory is not None and memory not in self.given_aside:
                self.given_aside.add(memory)
                self._hold(memory)
        for m in call.keeps:
            if m not in self.trace.outside and m not in self.kept_aside:
                self.kept_aside.add(m)
                self.keepers[m] += 1

    def _run_again(self, block: LetGo) -> int:
        """The most bytes that live while a block is recomputed; its freed memory is allocated again."""
        most = self.live + _rerun(self.trace, block)
        self.live += block.bytes(self.trace)
        for m in block.sources:
            self._read(m)
        return most

    def _gradients(self, call: Call) -> list[Gradient | None]:
        if call.seen.gradients:
            return list(call.seen.gradients)
        likes = [self.trace.values[number].like for number in call.operands]
        return [Gradient(False, like.bytes) if like.requires_grad else None for like in likes]

    def _release(self, at: int, call: Call) -> None:
        if at not in self.hidden_aside:
            self.live -= sum(call.hidden)
        for m in call.keeps:
            self._read(m)

    def _read(self, m: int) -> None:
        self.keepers[m] -= 1
        if not self.keepers[m] and m not in self.trace.outside and m not in self.received:
            self.live -= self.trace.bytes_of[m]

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _give(self, number: int, memory: int) -> None:
        """Add to the gradient of a value, in its own memory if no other value shares it, else in the addend's."""
        before = self.gradient_of.get(number)
        if before is None:
            self._hold(memory)
            self.gradient_of[number] = memory
        elif self.owners[before] > 1:
            self._hold(memory)
            self._let_go(before)
            self.gradient_of[number] = memory

    def _drop(self, number: int) -> None:
        memory = self.gradient_of.pop(number, None)
        if memory is not None:
            self._let_go(memory)

    def _hold(self, memory: int) -> None:
        self.owners[memory] += 1
        if self.owners[memory] == 1:
            self.live += self.sizes[memory]

    def _let_go(self, memory: int) -> None:
        self.owners[memory] -= 1
        if not self.owners[memory]:
            self.live -= self.sizes[memory]
