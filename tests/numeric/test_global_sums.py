"""Losses that are no sums over tokens, over several microbatches a rank: as one process on the global batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.laboratory import Case, Lab

LOSSES = ("balanced-loss", "spread-loss")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "dp2": ({"dp": 2}, {}),
    "tp2 pp2": ({"tp": 2, "pp": 2}, {}),
    "cp2 dp2": ({"cp": 2, "dp": 2}, {}),
    "pp2 vpp2, recompute": (
        {"pp": 2, "vpp": 2},
        {"pipeline": {"schedule": "interleaved_1f1b"}, "recompute": "full"},
    ),
    "pp2, zero bubble": ({"pp": 2}, {"pipeline": {"schedule": "zero_bubble"}}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", LOSSES)
def test_a_loss_of_means_is_that_of_the_global_batch(lab: Lab, model: str, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    assert lab.check(Case(model, mesh, rest, num_sequences=8, micro=1)).wrong == []
