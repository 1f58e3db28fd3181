"""Which random stream the ops of a lowered graph draw from.

    CPU     seed = hash(seed, step, global microbatch, which op, and for draws of each rank's own: the tp rank)
    CUDA    seed = hash of the same without the op, set once a forward; the op is a place in the generator's sequence

A CUDA generator counts (Philox): any place in its sequence costs the host two numbers, and no op waits for the device.

A graph that is captured draws from generators of its own, one for each draw, which are registered with it. Before each
replay they are set to the places from which the eager ops would draw: the same numbers, and no op of the graph sets a
place itself. Step and microbatch on the device are written before each replay, too: a graph of a part of a step writes
neither.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from passes.interceptors import installed

_DRAWS = 36  # bits of a place: 2^36 numbers for a thread of one op, and 2^28 ops


class Draw(NamedTuple):
    """One random op of one forward; ``sharded``: the tp ranks draw each their own.

    ``again``: the same numbers once more, in the backward: a graph that is captured draws them from another generator.
    """

    microbatch: int
    op: int
    sharded: bool
    again: bool = False


@dataclass
class RandomState:
    """Which random stream the next forward draws from: set by the executor before each forward (and recompute).

    Dropout acts while ``training``; in an evaluation it is the identity.
    Owns: for each device a generator of draws that all tp ranks share, and one of this rank's own draws. ``drawn``:
    collects the draws while they are watched. ``registered``: the generators of the graph under capture. ``default``:
    the one of them from which ops without a generator draw.
    """

    seed: int
    tp_rank: int
    step: int = 0
    microbatch: int = 0  # global index of the microbatch over all dp ranks
    training: bool = True
    drawn: dict[Draw, None] | None = None
    registered: Mapping[Draw, torch.Generator] | None = None
    default: torch.Generator | None = None
    is_again: bool = False
    _is_part: bool = False  # the capture covers only a part of a step
    _generators: dict[tuple[torch.device, bool], torch.Generator] = field(default_factory=dict, repr=False)
    _counters: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def begin(self, step: int, microbatch: int) -> None:
        changed = step != self.step
        self.step, self.microbatch = step, microbatch
        for counter in self._counters.values():
            self._count(counter, with_step=changed)

    def counter(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and microbatch as numbers on the device: a captured graph reads their values at its replay."""
        found = self._counters.get(device)
        if found is None:
            found = self._counters[device] = torch.zeros(2, dtype=torch.int64, device=device)
            self._count(found)
        return found[0], found[1]

    def _count(self, counter: torch.Tensor, *, with_step: bool = True) -> None:
        """Write the step only when it changes: a graph of several microbatches contains the writes between them.

        A graph of a part of a step would write the numbers of its capture with each replay: it writes none.
        """
        if self._is_part:
            return
        if with_step:
            counter[0].fill_(self.step)
        counter[1].fill_(self.microbatch)

    @contextmanager
    def again(self, step: int, microbatch: int) -> Iterator[None]:
        """Repeat inside the draws of an earlier forward."""
        before, self.is_again = (self.step, self.microbatch, self.is_again), True
        self.begin(step, microbatch)
        try:
            yield
        finally:
            self.begin(*before[:2])
            self.is_again = before[2]

    def generator(self, device: torch.device, op: int, sharded: bool) -> torch.Generator:
        """Return the generator for one draw of ``op``; ``sharded``: the tp ranks draw each their own."""
        draw = Draw(self.microbatch, op, sharded, self.is_again)
        if self.drawn is not None:
            self.drawn[draw] = None
        if self.registered is not None:
            return self.registered[draw]
        found = self._generators.get((device, sharded))
        if found is None:
            found = self._generators[device, sharded] = torch.Generator(device)
        return self.put(found, draw)

    def put(self, generator: torch.Generator, draw: Draw) -> torch.Generator:
        """Return ``generator``, set to the begin of ``draw`` in this step."""
        if generator.device.type != "cuda":
            return generator.manual_seed(self.stream_seed(draw))
        seed = self.stream_seed(draw, of_op=False)
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        return generator.set_offset(draw.op % (1 << 64 - _DRAWS) << _DRAWS)

    @contextmanager
    def watched(self) -> Iterator[dict[Draw, None]]:
        """Yield the draws made inside."""
        drawn: dict[Draw, None] = {}
        with installed((self, "drawn", drawn)):
            yield drawn

    def drawing_by(self, generators: Mapping[Draw, torch.Generator], *, is_part: bool) -> AbstractContextManager[None]:
        """Draw inside from the generators that are registered with the graph under capture.

        ``is_part`` of a step: step and microbatch are written before each replay, and not by the graph.
        """
        return installed((self, "registered", generators), (self, "_is_part", is_part))

    def put_all(self, generators: Mapping[Draw, torch.Generator]) -> None:
        """Set each generator to the begin of its draw in the current microbatch."""
        for draw, generator in generators.items():
            self.put(generator, draw._replace(microbatch=self.microbatch))

    @contextmanager
    def as_default(self, device: torch.device, op: int, sharded: bool) -> Iterator[None]:
        """Let ops that know no other generator draw from this stream inside: afterwards the default one continues."""
        own = self.generator(device, op, sharded)
        with installed((self, "default", own if self.registered is not None else None)), drawing_from(own):
            yield

    def stream_seed(self, draw: Draw, *, of_op: bool = True) -> int:
        """Return 63 bits of a hash of all that names a draw; without ``of_op``, a forward."""
        op = f"/{draw.op}" if of_op else ""
        text = f"{self.seed}/{self.step}/{draw.microbatch}{op}/{self.tp_rank if draw.sharded else -1}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def drawing_from(own: torch.Generator) -> Iterator[None]:
    """Inside, the default generator of a device continues from ``own``; afterwards ``own`` has the new state, and the
    default its old one.
    """
    if own.device.type == "cuda":
        default = torch.cuda.default_generators[own.device.index or 0]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(own.graphsafe_get_state())  # one state for both
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
        return
    default, state = torch.default_generator, torch.default_generator.get_state()
    default.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(default.get_state())
        default.set_state(state)
