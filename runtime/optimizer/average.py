"""A running mean of the weights (Polyak averaging), on the flat shards that this rank updates.

    a <- a + (1 - decay) · (w - a)      after each update that is not skipped; w: the main shard

It begins with the weights themselves. Each operation rounds an element on its own, so a shard of another layout has
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightAverage:
    """Owns the mean of each shard, in the shard's dtype. ``mains``: the shards, in one order."""

    def __init__(self, mains: Sequence[Tensor], decay: float) -> None:
        self._mains, self._decay = list(mains), decay
        self.shards = [main.detach().clone() for main in mains]

    def start(self) -> None:
        """Begin with the weights as they are now."""
        for average, main in zip(self.shards, self._mains, strict=True):
            average.copy_(main)

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """After an update; ``found_inf`` (on the device) is 1 if it was skipped: then nothing changes."""
        share = (1.0 - self._decay) * (1.0 - found_inf.to(torch.float64))
        for average, main in zip(self.shards, self._mains, strict=True):
            average.add_((main - average).mul_(share))

    @torch.no_grad()
    def exchange(self) -> None:
        """Weights and means change places; again: back, bitwise."""
        for average, main in zip(self.shards, self._mains, strict=True):
            kept = main.clone()
            main.copy_(average)
            average.copy_(kept)
