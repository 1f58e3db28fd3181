"""A layer of experts that a model applies several times, as ALBERT does: equal on every layout, or refused by line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor, nn

from tests.models import experts, selected_rows, sliced_experts, slots, sorted_experts
from tests.numeric.test_expert_layouts import FOLDINGS, LOOPS, STACKED, batch_of, built, check, layer_of
from tests.tools.simulated_mesh import equals_one_process

WAYS = (*LOOPS, *selected_rows.WAYS[:2], *sliced_experts.WAYS, *STACKED)
TIMES = 3


class Repeated(nn.Module):
    """The same layer, each time after a norm and with a residual; once more on what a second layer makes."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.norm, self.between = layer(), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(TIMES):
            x = x + self.layer(self.norm(x))
        return x + self.layer(self.between(x).tanh())


def make(way: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: built(partial(Repeated, partial(layer_of, way)))


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", ["ep2·dp2", "tp2·dp2·ep2, etp 2"])
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_every_time_is_as_in_one_process(way: Callable[..., Tensor], folding: str) -> None:
    check(make(way), FOLDINGS[folding])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"tensor_parallel": {"sequence_parallel": True}}])
@pytest.mark.parametrize("way", [experts.masks, experts.stacked], ids=lambda w: w.__name__)
def test_recomputed_and_sequence_parallel(way: Callable[..., Tensor], more: dict[str, object]) -> None:
    check(make(way), FOLDINGS["tp2·dp2·ep2, etp 1"], **more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*LOOPS, *sliced_experts.WAYS], ids=lambda w: w.__name__)
def test_without_ep_each_time_computes_the_rows_that_chose_an_expert(way: Callable[..., Tensor]) -> None:
    check(make(way), {"tp": 2})


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", sorted_experts.WAYS, ids=lambda w: w.__name__)
def test_rows_sorted_by_expert(way: Callable[..., Tensor]) -> None:
    layer = partial(sorted_experts.Sorting, way)
    check(lambda: built(partial(Repeated, layer)), FOLDINGS["tp2·dp2·ep2, etp 1"])


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", slots.WAYS, ids=lambda w: w.__name__)
def test_slots(way: Callable[..., Tensor]) -> None:
    """Tokens compete within the one microbatch."""
    layer = partial(slots.Slots, way)
    equals_one_process(lambda: built(partial(Repeated, layer)), batch_of(2), FOLDINGS["tp2·ep2, etp 1"])
