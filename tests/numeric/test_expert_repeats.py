"""A layer of experts that a model applies several times, as ALBERT does, and experts that numbers of tokens choose."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from tests.models import experts, hashed_experts, selected_rows, sliced_experts, slots, sorted_experts
from tests.numeric.test_expert_layouts import FOLDINGS, LOOPS, STACKED, batch_of, built, check, layer_of
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import equals_one_process, spec_of

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


# ---- experts that the numbers of tokens choose train over ranks as in one process; a token may have one of them twice


HASHED_WAYS = (sorted_experts.by_places, sorted_experts.of_named_tokens)


def made(numbers: hashed_experts.Numbers, way: sorted_experts.Way) -> nn.Module:
    torch.manual_seed(3)
    return hashed_experts.Hashing(numbers, way).double()


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("way", HASHED_WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("numbers", hashed_experts.NUMBERS, ids=lambda n: n.__name__)
def test_experts_that_no_score_chooses(numbers, way, folding):
    check(lambda: made(numbers, way), FOLDINGS[folding])


@pytest.mark.parametrize("folding", ["ep2·dp2", "tp2·dp2·ep2, etp 1"])
def test_all_tokens_twice_to_one_expert(folding):
    """As a table that was not loaded says."""

    def zeros() -> nn.Module:
        model = made(hashed_experts.of_table, sorted_experts.by_places)
        model.get_buffer("table").zero_()
        return model

    check(zeros, FOLDINGS[folding])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("way", [experts.masks, experts.copied], ids=lambda w: w.__name__)
def test_experts_that_compute_all_tokens(way, mesh):
    check(lambda: made(hashed_experts.of_table, way), mesh, batch=batch_of(4))


@pytest.mark.parametrize("way", [experts.masks, experts.copied], ids=lambda w: w.__name__)
def test_a_token_that_may_have_an_expert_twice_is_no_pair_of_each(way):
    with pytest.raises(PlanError, match="its choices are not the result of one topk"):
        plan_again(made(hashed_experts.of_table, way), spec_of(batch_of(4), FOLDINGS["ep2·dp2"]))
