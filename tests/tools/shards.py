"""Full tensors of the shards that ranks hold, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planner.sharding.boxes import Box, Part
from runtime.weights.shards import runs_in


def assemble(parts: Sequence[Part], shards: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The full tensor of all its parts, without padding."""
    full = shards[0].new_empty(tuple(shape))
    for part, held in zip(parts, shards, strict=True):
        for local, place in runs_in(part, shape, Box.whole(shape)):
            full[place].copy_(held[local])
    return full
