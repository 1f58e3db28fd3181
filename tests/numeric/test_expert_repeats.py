"""A layer of experts that a model applies several times, as ALBERT does: equal on every layout, or refused by line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.models import experts, selected_rows, sliced_experts, slots, sorted_experts
from tests.numeric.test_expert_layouts import FOLDINGS, LOOPS, STACKED, batch_of, built, check, layer_of
from tests.tools.simulated_mesh import run_mesh

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


@pytest.mark.sampled(2)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", ["ep2·dp2", "tp2·dp2·ep2, etp 2"])
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_every_time_is_as_in_one_process(way: Callable[..., Tensor], folding: str) -> None:
    mesh = FOLDINGS[folding]
    check(make(way), batch_of(2 * mesh.get("dp", 1)), mesh, 1e-10, 1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [{"recompute": "full"}, {"tensor_parallel": {"sequence_parallel": True}}])
@pytest.mark.parametrize("way", [experts.masks, experts.stacked], ids=lambda w: w.__name__)
def test_recomputed_and_sequence_parallel(way: Callable[..., Tensor], more: dict[str, object]) -> None:
    check(make(way), batch_of(4), FOLDINGS["tp2·dp2·ep2, etp 1"], 1e-10, 1e-10, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [*LOOPS, *sliced_experts.WAYS], ids=lambda w: w.__name__)
def test_without_ep_each_time_computes_the_rows_that_chose_an_expert(way: Callable[..., Tensor]) -> None:
    check(make(way), batch_of(2), {"tp": 2}, 1e-10, 1e-10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", sorted_experts.WAYS, ids=lambda w: w.__name__)
def test_rows_sorted_by_expert(way: Callable[..., Tensor]) -> None:
    layer = partial(sorted_experts.Sorting, way)
    check(lambda: built(partial(Repeated, layer)), batch_of(4), FOLDINGS["tp2·dp2·ep2, etp 1"], 1e-10, 1e-10)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", slots.WAYS, ids=lambda w: w.__name__)
def test_slots(way: Callable[..., Tensor]) -> None:
    """Tokens compete within the one microbatch."""
    batch, layer = batch_of(2), partial(slots.Slots, way)
    ran = run_mesh(lambda: built(partial(Repeated, layer)), batch, FOLDINGS["tp2·ep2, etp 1"])
    model = built(partial(Repeated, layer))
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(ran.loss, loss.detach(), rtol=1e-10, atol=1e-10)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for name, parameter in model.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (ran.gradients.get(name, torch.zeros_like(truth)) - truth).norm() <= 1e-10 * norm, name
