"""Experts over processes, with pipelines and several microbatches: loss, gradients and three updates of one process.

An own model in float64, Mixtral in float32. tests/numeric/test_expert_layouts.py has more foldings, as threads.
"""

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
CASES += [("slots", mesh) for mesh in SLOTS]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "mesh"), CASES, ids=name_of)
def test_a_folding_equals_one_process(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(model, mesh, MODELS.get(model, {}))).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), zip(cycle(MODELS), OF_EIGHT, strict=False), ids=name_of)
def test_a_folding_of_eight_ranks_equals_one_process(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(model, mesh, MODELS[model])).wrong == []


OVER_STAGES = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SETTINGS = {
    "zero 0": Case("experts", OVER_STAGES, {"optimizer": {"zero": 0}}),
    "small buckets": Case("experts", OVER_STAGES, {"optimizer": {"bucket_size": 1000}}),
    "not clipped": Case("experts", OVER_STAGES, {"optimizer": {"clip_grad_norm": None}}),
    "along the sequence": Case(
        "experts", OVER_STAGES, {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
    ),
    "interleaved, dp2": Case("experts-4-layers", {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}, INTERLEAVED),
    "interleaved, tp2": Case("experts-4-layers", {"pp": 2, "vpp": 2, "tp": 2, "ep": 2, "etp": 1}, INTERLEAVED),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_equal_one_process(lab: Lab, name: str) -> None:
    assert lab.check(SETTINGS[name]).wrong == []
