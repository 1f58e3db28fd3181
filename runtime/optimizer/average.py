"""A running mean of the weights (Polyak averaging), on the flat shards that this rank updates.

    a <- a + (1 - decay) · (w - a)      after each update that is not skipped; w: the main shard

It begins with the weights themselves. Each operation rounds an element on its own, so a shard of another layout has
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.spec.update_rules import MEAN_RULES
from runtime.optimizer.flat import FlatOptimizer
from runtime.optimizer.schedule_free import mean_of


class WeightAverage:
    """Owns the mean of each shard, in the shard's dtype. ``mains``: the shards, in one order."""

    def __init__(self, mains: Sequence[Tensor], decay: float) -> None:
        self._mains, self._decay = list(mains), decay
        self.shards = [main.detach().clone() for main in mains]

    @property
    def held(self) -> Sequence[Tensor]:
        """The memory of all means."""
        return self.shards

    def of(self, index: int) -> Tensor:
        """The mean of one shard."""
        return self.shards[index]

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


class ScheduleFreeMean:
    """The mean that a schedule-free rule evaluates, made of each shard and its distances when it is asked for.

    ``mains``: the shards, in one order; ``optimizer`` updates them.
    """

    held: Sequence[Tensor] = ()  # no memory of its own

    def __init__(self, mains: Sequence[Tensor], optimizer: FlatOptimizer | None) -> None:
        self._mains, self._optimizer = list(mains), optimizer
        self._kept: list[Tensor] = []

    def start(self) -> None:
        """Nothing: it begins with the weights where the distances are zero."""

    def update(self, found_inf: Tensor) -> None:
        """Nothing: the rule has moved the weights and the distances."""

    def of(self, index: int) -> Tensor:
        """Of one shard, as a new tensor."""
        main = self._mains[index]
        made = main.detach().clone()
        assert self._optimizer is not None, "a shard has an optimizer"
        distance = self._optimizer.state.get(main, {}).get("distance")
        if distance is None:
            return made
        for start, stop, settings in self._optimizer.settings_of(main):
            if settings.rule in MEAN_RULES:
                made[start:stop] = mean_of(main[start:stop], distance[start:stop], settings)
        return made

    @torch.no_grad()
    def exchange(self) -> None:
        """Weights and means change places; again: back, bitwise."""
        if self._kept:
            for main, kept in zip(self._mains, self._kept, strict=True):
                main.copy_(kept)
            self._kept = []
            return
        means = [self.of(index) for index in range(len(self._mains))]
        self._kept = [main.detach().clone() for main in self._mains]
        for main, mean in zip(self._mains, means, strict=True):
            main.copy_(mean)
