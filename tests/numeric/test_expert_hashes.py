"""Experts that the numbers of tokens choose train over ranks as in one process; a token may have one of them twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner import PlanError
from tests.models import experts, hashed_experts, sorted_experts
from tests.numeric.test_expert_layouts import FOLDINGS, batch_of, check
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

WAYS = (sorted_experts.by_places, sorted_experts.of_named_tokens)


def made(numbers: hashed_experts.Numbers, way: sorted_experts.Way) -> nn.Module:
    torch.manual_seed(3)
    return hashed_experts.Hashing(numbers, way).double()


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
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
