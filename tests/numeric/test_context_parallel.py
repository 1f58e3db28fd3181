"""The sequence cut over cp, on processes: loss, gradients and three clipped updates are those of one process."""

from typing import Any

import pytest

from tests.numeric.test_layouts import name_of
from tests.tools.jobs import train_steps
from tests.tools.laboratory import Case, Lab

SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
LAYOUTS = [{"cp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2}]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_layout_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sequence parallel": ("llama", {"cp": 2, "tp": 2}, SEQUENCE),
    "a mask of windows": ("gemma2", {"cp": 2}, {}),
    "an encoder, masks in the batch": ("bert", {"cp": 2, "dp": 2}, {}),
    "relative biases, two sequences": ("t5", {"cp": 2, "tp": 2}, {}),
    "zero 0, another order of axes": (
        "gpt2",
        {"cp": 2, "dp": 2, "order": "dp-cp-tp-ep-pp"},
        {"optimizer": {"zero": 0}},
    ),
    "convolutions of whole sequences": ("state-space", {"cp": 2, "tp": 2}, SEQUENCE),
    "convolutions, computed again": ("state-space", {"cp": 2, "pp": 2}, {"recompute": "full"}),
    "patches of an image": ("diffusion", {"cp": 2, "tp": 2}, SEQUENCE),
    "a text of 5 tokens joined to patches": ("5 tokens and an image", {"cp": 2, "tp": 2}, SEQUENCE),
    "frames, then places": ("space and time", {"cp": 2, "dp": 2}, {"recompute": "full"}),
    "sound before text": ("sound", {"cp": 2, "pp": 2}, {"pipeline": {"schedule": "zero_bubble", "split": [1, 1]}}),
    "one chunk after another": ("gpt2", {"cp": 2, "pp": 2, "vpp": 2}, {"pipeline": {"schedule": "interleaved_1f1b"}}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(lab: Lab, case: str) -> None:
    model, mesh, rest = CASES[case]
    assert lab.check(Case(model, mesh, rest)).wrong == []


@pytest.mark.thorough
def test_a_share_of_the_batch_is_that_of_all_ranks_of_cp(lab: Lab) -> None:
    whole, shares = (
        lab.run(Case("gpt2", {"cp": 2, "dp": 2}, job=train_steps, job_arguments=(local,))) for local in (False, True)
    )
    assert whole[0].losses == pytest.approx(shares[0].losses, rel=1e-12)
    assert whole[0].norms == pytest.approx(shares[0].norms, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_with_dropout_what_is_computed_again_draws_the_same(lab: Lab, kind: str) -> None:
    kept, again = (
        lab.run(Case("gpt2-dropout", {"cp": 2}, {"train": True, **how}, job=train_steps, job_arguments=(False,)))[0]
        for how in ({}, {"recompute": kind})
    )
    assert (kept.losses, kept.norms) == (again.losses, again.norms)
    assert all(kept.parameters[name].equal(again.parameters[name]) for name in kept.parameters)


@pytest.mark.thorough
@pytest.mark.slow
def test_cp2_tp2_pp2_equals_one_process(lab: Lab) -> None:
    assert lab.check(Case("gpt2", {"cp": 2, "tp": 2, "pp": 2})).wrong == []
