"""Every exchange counts: a run without any single one of them differs from one process."""

from typing import Any

import pytest

from tests.tools import jobs
from tests.tools.laboratory import Case, Lab

TP_PP = {"tp": 2, "pp": 2}


SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "rest"),
    [
        ("gpt", TP_PP, {}),
        ("gpt", {"tp": 2}, {}),
        ("gpt", {"tp": 2}, SEQUENCE_PARALLEL),
        ("normed-keys", {"tp": 2}, {}),
        ("normed-keys", {"tp": 2}, SEQUENCE_PARALLEL),
        ("llama-one-key-head", {"tp": 2}, {}),
        ("gpt_neox", {"tp": 2}, {}),
        ("z-loss", {"tp": 2}, {}),
        pytest.param("t5", {"tp": 2}, {}, marks=pytest.mark.thorough),
        ("experts", {"dp": 2, "ep": 2}, {}),
        ("experts", {"tp": 2, "ep": 2, "etp": 1}, {}),
        ("slots", {"dp": 2, "ep": 2}, {}),
        ("slots", {"tp": 2, "ep": 2, "etp": 1}, {}),
    ],
)
def test_a_run_without_any_one_collective_differs_from_one_process(
    lab: Lab, model: str, mesh: dict[str, int], rest: dict[str, Any]
) -> None:
    whole, *mutants = lab.check_each(Case(model, mesh, rest, num_sequences=4, job=jobs.without_each_collective))
    assert whole.of("loss", "gradient") == []
    assert mutants
    assert [n for n, mutant in enumerate(mutants) if not mutant.of("loss", "gradient")] == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "summed"),
    [
        ("gpt", TP_PP, "tokens.weight over embedding"),
        ("normed-keys", {"tp": 2}, "layers.0.parts.attention.norms.0.scale over tp"),
        ("llama-one-key-head", {"tp": 2}, "model.layers.0.self_attn.k_proj.weight over tp"),
    ],
)
def test_a_step_without_any_one_sum_of_partial_gradients_differs(
    lab: Lab, model: str, mesh: dict[str, int], summed: str
) -> None:
    mutants = lab.check_each(Case(model, mesh, num_sequences=4, job=jobs.without_each_sum_of_a_step))
    assert summed in mutants
    assert [name for name, mutant in mutants.items() if not mutant.of("gradient")] == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "etp": 1}], ids=str)
def test_a_step_without_the_sum_over_edp_differs(lab: Lab, mesh: dict[str, int]) -> None:
    case = Case("experts", mesh, {"optimizer": {"zero": 0}}, num_sequences=8, job=jobs.with_and_without_edp)
    whole, alone = lab.check_each(case)
    assert whole.of("gradient") == []
    assert alone.of("gradient") != []
    wrong = [words for words in alone.of("gradient ") if not words.startswith("gradient norm")]
    assert all("experts" in words for words in wrong), "what is not of experts is as it was"
