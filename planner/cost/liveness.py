"""The live bytes of one forward and one backward of a stage on a rank, call by call.

    forward     a value lives until its last reader, or until the backward if autograd saves it
    backward    a saved tensor lives until the last backward of a call that saved it; a gradient from the first backward
                of a reader of its value until the backward of the call that computed the value

Backwards run in the order of autograd: later calls first. Received values live until the end of the stage's backward.
If weight gradients wait for a W, the saved tensors of their products and the gradients of their results live until it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.decisions import Decisions
from planner.pipeline.ledger import StageBytes
from planner.trace.observe import Gradient
from planner.trace.trace import LetGo, StageTrace, TraceCall


class Walked(NamedTuple):
    """The bytes of a stage; for ``forward`` and ``backward``, (index of a call, peak live bytes while it runs)."""

    bytes: StageBytes
    forward: list[tuple[int, int]]
    backward: list[tuple[int, int]]


def walked(
    trace: StageTrace, after_blocks: frozenset[str] = frozenset(), later: frozenset[int] = frozenset()
) -> Walked:
    """Return the live bytes of a stage. ``after_blocks``: names of calls after the last block; ``later``: indices of
    the calls with weight gradients that a W computes.
    """
    held, kept = held_between(trace)
    forward, ran = list(forward_live(trace, held)), Backward(trace, kept, later)
    backward = list(ran.run())
    last, by_last = saved_last(trace, after_blocks)
    sent = set(trace.sent.values())
    of = StageBytes(
        kept,
        logits=sum(trace.bytes_of[m] for m in last) + sum(sum(call.hidden) for call in by_last),
        forward=max([kept, *(most for _, most in forward)]),
        backward=max([kept, *(most for _, most in backward)]),
        aside=ran.aside,
        received=sum(trace.bytes_of[m] for m in set(trace.received.values()) & held),
        sent=sum(trace.bytes_of[m] for m in sent - held - trace.outside),
        passed_on=sum(trace.bytes_of[m] for m in sent & held - trace.outside),
    )
    return Walked(of, forward, backward)


def held_between(trace: StageTrace) -> tuple[set[int], int]:
    """Return the memory that lives between forward and backward, and its bytes with hidden tensors."""
    held = set(trace.kept) | set(trace.received.values())
    for block in trace.let_go:
        held = (held - block.memory) | block.sources
    inside = sum(sum(trace.calls[at].hidden) for block in trace.let_go for at in block.inside)
    return held, sum(trace.bytes_of[m] for m in held) + trace.hidden - inside


def saved_last(trace: StageTrace, after_blocks: frozenset[str]) -> tuple[set[int], list[TraceCall]]:
    """Return the memory that calls after the last block allocate and save, and these calls."""
    last = [call for call in trace.calls if not call.names.isdisjoint(after_blocks)]
    earlier = {m for call in trace.calls if call.names.isdisjoint(after_blocks) for m in call.makes}
    made = {m for call in last for m in call.makes} - earlier - trace.outside
    return {m for call in last for m in call.keeps} & made, last


def after_blocks(decisions: Decisions) -> list[str]:
    """Return the names of the calls after the last block: a final norm, the head, the loss; [] without blocks."""
    block_of = decisions.blocks.block_of()
    calls = [node.name for node in decisions.program.graph.graph.nodes if node.op == "call_function"]
    last = max((at for at, name in enumerate(calls) if name in block_of), default=len(calls))
    return calls[last + 1 :]


def forward_live(trace: StageTrace, held: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (index of a call, peak live bytes during its forward). ``held``: memory that outlives the forward."""
    last_read = {m: at for at, call in enumerate(trace.calls) for m in (*call.reads, *call.makes)}
    last_read |= {m: block.end for block in trace.let_go for m in block.memory}
    ends = {block.end: block for block in trace.let_go}
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
    """Return the peak live bytes while a block is recomputed, without its sources."""
    calls = [trace.calls[at] if at in block.inside else replace(trace.calls[at], hidden=()) for at in block.again]
    received = {str(m): m for m in block.sources}
    alone = replace(trace, calls=calls, received=received, sent={}, let_go=())
    sources = sum(trace.bytes_of[m] for m in block.sources)
    return max((most for _, most in forward_live(alone, {*block.memory, *block.sources})), default=sources) - sources


class Backward:
    """The walk over the backward of a stage. ``gradient_of``: value → the memory of its pending gradient; ``owners``:
    how many gradients share a memory; ``sizes``: its bytes."""

    def __init__(self, trace: StageTrace, kept: int, later: frozenset[int] = frozenset()) -> None:
        self.trace, self.later = trace, later
        self.kept_aside: set[int] = set()
        self.given_aside: set[int] = set()
        self.hidden_aside: set[int] = set()  # indices of calls
        self.rerun_at = {block.reads: block for block in trace.let_go}
        self.sizes: list[int] = []
        self.owners = Counter[int]()
        self.gradient_of: dict[int, int] = {}
        self.live = kept
        self.keepers = Counter(m for call in trace.calls for m in call.keeps)
        self.keepers.update(m for block in trace.let_go for m in block.sources)  # the rerun frees them
        self.received = set(trace.received.values())
        self.first_reader = {v: at for at, call in reversed(list(enumerate(trace.calls))) for v in call.operands}

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield (index of a call, peak live bytes while its backward runs), the last call first."""
        self._start()
        for at in reversed(range(len(self.trace.calls))):
            call = self.trace.calls[at]
            again = self._run_again(self.rerun_at[at]) if at in self.rerun_at else 0
            yield at, max(again, self._call(at, call))

    def _start(self) -> None:
        """Add the gradients that the next stage sends for this stage's outputs, or the gradient of the loss."""
        sent = set(self.trace.sent.values())
        for value in self.trace.values:
            if value.memory in sent and value.like.requires_grad and value.memory not in self.trace.outside:
                sent.discard(value.memory)
                self._give(value.number, self._new(self.trace.bytes_of[value.memory]))
        last = next((c for c in reversed(self.trace.calls) if c.results), None)
        if last is not None and not self.trace.sent:
            for number in last.results:
                self._give(number, self._new(self.trace.values[number].like.bytes))

    def _call(self, at: int, call: TraceCall) -> int:
        """Run the backward of ``call``; return the peak live bytes."""
        incoming = [self.gradient_of.get(number) for number in call.results]
        if at in self.later:
            self._put_aside(at, call, incoming)
        first = next((g for g in incoming if g is not None), None)
        most = self.live
        gradients = self._gradients(call)
        overwrites = first is not None and any(g is not None and g.is_kept for g in gradients)
        if overwrites:  # the backward writes a gradient into the saved tensor
            self._release(at, call)
        if first is not None:
            most += call.seen.backward_peak
            for number, gradient in zip(call.operands, gradients, strict=True):
                if gradient is not None:
                    self._give(number, first if gradient.is_given else self._new(gradient.bytes))
        most = max(most, self.live)
        for number in call.results:
            self._drop(number)
        for number in call.operands:  # a parameter's gradient is added to its buffer after its last reader
            if self.trace.values[number].memory in self.trace.outside and self.first_reader[number] == at:
                self._drop(number)
        if not overwrites:
            self._release(at, call)
        return most

    @property
    def aside(self) -> int:
        kept = sum(self.trace.bytes_of[m] for m in self.kept_aside)
        hidden = sum(sum(self.trace.calls[at].hidden) for at in self.hidden_aside)
        return kept + hidden + sum(self.sizes[g] for g in self.given_aside)

    def _put_aside(self, at: int, call: TraceCall, incoming: Sequence[int | None]) -> None:
        """Keep the saved tensors of a deferred call, and the gradients of its results, until its W."""
        self.hidden_aside.add(at)
        for memory in incoming:
            if memory is not None and memory not in self.given_aside:
                self.given_aside.add(memory)
                self._hold(memory)
        for m in call.keeps:
            if m not in self.trace.outside and m not in self.kept_aside:
                self.kept_aside.add(m)
                self.keepers[m] += 1

    def _run_again(self, block: LetGo) -> int:
        """Recompute a block, which allocates its freed memory; return the peak live bytes."""
        most = self.live + _rerun(self.trace, block)
        self.live += sum(self.trace.bytes_of[m] for m in block.memory)
        self.live += sum(sum(self.trace.calls[at].hidden) for at in block.inside)
        for m in block.sources:
            self._read(m)
        return most

    def _gradients(self, call: TraceCall) -> list[Gradient | None]:
        if call.seen.gradients:
            return list(call.seen.gradients)
        likes = [self.trace.values[number].like for number in call.operands]
        return [Gradient(False, like.bytes) if like.requires_grad else None for like in likes]

    def _release(self, at: int, call: TraceCall) -> None:
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
        """Add ``memory`` to the gradient of a value: in place, unless other values share the gradient's memory."""
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
