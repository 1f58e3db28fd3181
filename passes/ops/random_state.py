"""Which random stream the ops of a lowered graph draw from.

    CPU     seed = hash(seed, step, global microbatch, which op, and where each rank draws its own: the tp rank)
    CUDA    seed = hash of the same without the op, set once a forward; the op is a place in the generator's sequence

A CUDA generator counts (Philox): any place in its sequence costs the host two numbers, and no op waits for the device.
Its state may be registered with a CUDA graph, which then reads seed and place of the day when it is replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_DRAWS = 36  # bits of a place: 2^36 numbers for a thread of one op, and 2^28 ops


@dataclass
class RandomState:
    """Which random stream the next forward draws from: set by the executor before each forward (and recompute).

    Dropout acts while ``training``; in an evaluation it is the identity.
    Owns: for each device a generator of what all tp ranks draw alike and one of what is this rank's own.
    """

    seed: int
    tp_rank: int
    step: int = 0
    microbatch: int = 0  # global index of the microbatch over all dp ranks
    training: bool = True
    _generators: dict[tuple[torch.device, bool], torch.Generator] = field(default_factory=dict, repr=False)

    def begin(self, step: int, microbatch: int) -> None:
        self.step = step
        self.microbatch = microbatch

    def generator(self, device: torch.device, op: int, sharded: bool) -> torch.Generator:
        """The generator for one draw of ``op``; ``sharded``: the tp ranks draw each their own."""
        found = self._generators.get((device, sharded))
        if found is None:
            found = self._generators[device, sharded] = torch.Generator(device)
        if device.type != "cuda":
            return found.manual_seed(self.stream_seed(op, sharded))
        seed = self.stream_seed(None, sharded)
        if found.initial_seed() != seed:
            found.manual_seed(seed)
        return found.set_offset(op % (1 << 64 - _DRAWS) << _DRAWS)

    @contextmanager
    def as_default(self, device: torch.device, op: int, sharded: bool) -> Iterator[None]:
        """Ops that know no other generator draw from the default one: it has this stream, then its own again."""
        own = self.generator(device, op, sharded)
        if device.type == "cuda":
            default = torch.cuda.default_generators[device.index or 0]
            before = default.graphsafe_get_state()
            default.graphsafe_set_state(own.graphsafe_get_state())
            restore = default.graphsafe_set_state
        else:
            default = torch.default_generator
            before = default.get_state()
            default.set_state(own.get_state())
            restore = default.set_state
        try:
            yield
        finally:
            restore(before)  # pyright: ignore[reportArgumentType]

    def stream_seed(self, op: int | None, sharded: bool) -> int:
        """63 bits of a hash of all that names a draw; ``op`` None: a forward."""
        of_op = "" if op is None else f"/{op}"
        text = f"{self.seed}/{self.step}/{self.microbatch}{of_op}/{self.tp_rank if sharded else -1}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
