"""examples/own_data.py: a user's own loader and sampler train the same on two processes as alone."""

from __future__ import annotations

import pytest

from examples.own_data import train
from runtime.distributed.launch import launch
from tests.tools.limits import HANG_SECONDS


@pytest.mark.thorough
@pytest.mark.slow
def test_a_loader_of_ones_own_trains_the_same_on_two_processes_as_alone() -> None:
    alone = train(1)
    first, second = launch(train, 2, 1, timeout_seconds=HANG_SECONDS)
    assert first == second == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 25
    assert alone[-1] < alone[0]
