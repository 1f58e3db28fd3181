"""Dropout: one mask for all tp ranks outside the parallel regions, one for each inside, none depends on dp or pp."""

from __future__ import annotations

import pytest

from tests.tools import jobs
from tests.tools.comparison import compare
from tests.tools.laboratory import Case, Lab

TRAIN = {"train": True}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("model", ["gpt-dropout", "dropout-inside"])
def test_masks_do_not_depend_on_stages_or_replicas(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    alone, spread = (lab.run(Case(model, m, TRAIN))[0] for m in ({"dp": 1}, mesh))
    assert compare(spread, alone).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_masks_outside_parallel_regions_do_not_depend_on_tp(lab: Lab, mesh: dict[str, int]) -> None:
    alone, spread = (lab.run(Case("dropout-outside", m, TRAIN))[0] for m in ({"dp": 1}, mesh))
    assert compare(spread, alone).wrong == []


def test_masks_are_equal_on_tp_ranks_outside_and_different_inside(lab: Lab) -> None:
    first, second = lab.run(Case("dropout-inside", {"tp": 2}, TRAIN, job=jobs.dropout_masks))
    assert {inside for inside, _ in first.values()} == {True, False}
    for name, (inside, mask) in first.items():
        assert mask.equal(second[name][1]) == (not inside)
    masks = [mask for _, mask in first.values()]
    assert not any(a.equal(b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.thorough
def test_losses_repeat_with_the_seed_and_change_with_seed_and_step(lab: Lab) -> None:
    still = {"train": True, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}
    first, again, other = (
        lab.run(Case("gpt-dropout", {"tp": 2, "dp": 2}, still | {"seed": seed}, job=jobs.losses_without_updates))[0]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == 3


@pytest.mark.thorough
def test_evaluation_mode_captures_no_dropout(lab: Lab) -> None:
    assert lab.check(Case("gpt-dropout", {"tp": 2, "pp": 2})).wrong == []
