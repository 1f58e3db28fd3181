"""Experts over processes, with pipelines and several microbatches: loss, gradients and three updates of one process.

An own model in float64, Mixtral in float32. tests/numeric/test_expert_layouts.py has more foldings, as threads.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.tools.laboratory import Case, Lab, name_of

FOLDINGS = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    {"pp": 2, "dp": 2, "ep": 2},
    {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    {"pp": 2, "dp": 2, "etp": 2},
    {"tp": 2, "pp": 2, "etp": 1},
    {"tp": 2, "pp": 2},
]
OF_EIGHT = [
    {"tp": 2, "pp": 2, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "dp": 4, "ep": 4, "etp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1},
]


SLOTS = [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"pp": 2, "dp": 2, "ep": 2}]
MODELS = {"experts": {}, "mixtral": {"precision": {"parameters": "float32"}}}  # grouped products have no float64


# The stacks of a family are on half of them: what is cut there is the same (test_expert_layouts).
CASES = [("experts", mesh) for mesh in FOLDINGS] + [("mixtral", mesh) for mesh in FOLDINGS[1::2]]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "mesh"), CASES, ids=name_of)
def test_a_folding_equals_one_process(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(model, mesh, MODELS[model])).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", SLOTS, ids=name_of)
def test_slots_of_experts_equal_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    assert lab.check(Case("slots", mesh)).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), zip(cycle(MODELS), OF_EIGHT, strict=False), ids=name_of)
def test_a_folding_of_eight_ranks_equals_one_process(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(model, mesh, MODELS[model])).wrong == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "rest",
    [
        {"optimizer": {"zero": 0}},
        {"optimizer": {"bucket_size": 1000}},
        {"optimizer": {"clip_grad_norm": None}},
        {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}},
    ],
    ids=str,
)
def test_settings_equal_one_process(lab: Lab, rest: dict[str, object]) -> None:
    mesh = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    assert lab.check(Case("experts", mesh, rest)).wrong == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 1}], ids=name_of)
def test_an_interleaved_pipeline_equals_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    rest = {"pipeline": {"schedule": "interleaved_1f1b"}}
    assert lab.check(Case("experts-4-layers", {"pp": 2, "vpp": 2, **mesh}, rest)).wrong == []
