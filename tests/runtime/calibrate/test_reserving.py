"""The steps by which `calibrate` measures what the allocator of a GPU reserves."""

from __future__ import annotations

import pytest
import torch

from planner.cluster.cluster import GPU_SLACK
from runtime.calibrate.measuring import reserved_share, train


def test_recomputed_layers_have_the_gradients_of_kept_ones() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        found.append(train(torch.device("cpu"), again=again, width=16, length=4))
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*found, strict=True))
    assert len(found[0]) == 4 * 6 + 1


@pytest.mark.gpu
def test_a_gpu_reserves_a_plausible_share() -> None:
    share = reserved_share(torch.device("cuda"))
    assert share is None or GPU_SLACK <= share < 0.5
