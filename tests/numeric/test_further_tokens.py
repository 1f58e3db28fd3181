"""Losses between blocks, of further tokens: they equal one process over cp and tp, whatever blocks are recomputed."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.further_tokens import IGNORED, VOCABULARY, FurtherTokens
from tests.tools.simulated_mesh import equals_one_process

SEQUENCE_PARALLEL = {"sequence_parallel": True, "vocabulary_multiple": 8}
CP2_TP2 = {"cp": 2, "tp": 2}
CASES: dict[str, tuple[dict[str, int], Any]] = {
    "cp2 tp2, none": (CP2_TP2, "none"),
    "cp2 tp2, full": (CP2_TP2, "full"),
    "cp2 tp2, all but the first": (CP2_TP2, {"*": "full", "*0": "none"}),
    "cp2 tp2, selective": (CP2_TP2, "selective"),
    "tp2 dp2, full": ({"tp": 2, "dp": 2}, "full"),
}
QUICK = ("cp2 tp2, full", True)
REST = [case for case in product(CASES, (False, True)) if case != QUICK]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(VOCABULARY, (4, 8), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels.masked_fill(labels % 5 == 0, IGNORED)}


@pytest.mark.parametrize(
    ("name", "own_heads"), [QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in REST)]
)
def test_loss_and_every_gradient_equal_one_process(name: str, own_heads: bool):
    mesh, recompute = CASES[name]
    options = {"recompute": recompute, "tensor_parallel": SEQUENCE_PARALLEL}
    make = lambda: FurtherTokens(own_heads=own_heads)  # noqa: E731
    ran = equals_one_process(make, batch(), mesh, each=(1e-9, 1e-12), **options)
    assert bool(ran.plan.recompute) == (recompute != "none")
