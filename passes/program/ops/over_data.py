"""A value summed over the ranks that run the other microbatches of the global batch at the same time."""

from __future__ import annotations

from torch import Tensor


def over_data(share: Tensor) -> Tensor:
    """In a captured graph: Σ of the dp ranks' shares, with the gradients summed too. Of one process: the value."""
    return share
