"""Graphs on any device: recorded graphs, with NaN in static memory that must not be read any more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from passes.ops.random_state import RandomState
from runtime.cuda_graphs.pool import Pool
from runtime.cuda_graphs.recorded import RecordedGraph, poison


class Emulation:
    """Makes recorded graphs."""

    def __init__(self, random: RandomState, device: torch.device) -> None:
        self._random, self._device = random, device

    def pool(self) -> Pool:
        return Pool(self._device)

    def graph(self, pool: Pool, generators: Collection[Any]) -> RecordedGraph:
        return RecordedGraph(pool, self._random, generators)

    def warm_up(self, body: Callable[[], None]) -> None:
        body()

    def spoil(self, tensors: Collection[Tensor]) -> None:
        for tensor in tensors:
            poison(tensor)
