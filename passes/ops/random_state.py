"""Which random stream the ops of a lowered graph draw from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RandomState:
    """Which random stream the next forward draws from: set by the executor before each forward (and recompute).

    Dropout acts while ``training``; in an evaluation it is the identity.
    """

    seed: int
    tp_rank: int
    step: int = 0
    microbatch: int = 0  # global index of the microbatch over all dp ranks
    training: bool = True

    def begin(self, step: int, microbatch: int) -> None:
        self.step = step
        self.microbatch = microbatch
