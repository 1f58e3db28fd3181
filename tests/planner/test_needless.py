"""Nothing is computed whole that can be cut: the share of FLOPs, the exchanges, and numbers equal to one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.passes.simulated_model import assert_equals_one_process, num_collectives
from tests.planner.needless import (
    LOSSES,
    ConvolutionModule,
    JoinedBiases,
    JoinedBiasesOfFive,
    Layered,
    Mlp,
    batch,
)

OUTSIDE = 4  # a lookup, the head's f, the loss's maximum and its sums

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "biases and new zeros": lambda: JoinedBiases(torch.zeros_like),
    "biases and a buffer": lambda: JoinedBiasesOfFive(lambda held: held),
    "convolutions, batch norm in training": lambda: ConvolutionModule(frozen=False),
    "convolutions, batch norm in evaluation": lambda: ConvolutionModule(frozen=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_cut_with_one_exchange_each_way(name):
    made = assert_equals_one_process(lambda: Layered(LAYERS[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert num_collectives(made) == OUTSIDE + 2 * 2


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_classes_leaves_the_head_cut(name):
    made = assert_equals_one_process(lambda: Layered(Mlp, LOSSES[name]()), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert num_collectives(made) == OUTSIDE + 2 * 2
    assert [p.style for p in made.parameters if p.name == "head.weight"] == ["vocab"]
