"""Sequence parallelism falls out of the same types: the residual cut along the sequence, and everything still equal."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from tests.numeric.own_models import MODELS
from tests.numeric.server import Case, Lab
from tests.numeric.zoo import FAMILIES

# an image and its class token are 5 or 17 patches long: no tp divides them
NAMES = sorted(n for n in (*FAMILIES, *MODELS) if "vit" not in n and "dropout" not in n)
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}


@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama", "bert", "qwen3"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_sequence_parallel_equals_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout, SEQUENCE)).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("model", NAMES)
def test_sequence_parallel_of_every_family_equals_one_process(lab: Lab, model: str) -> None:
    wrong = {}
    for layout in ({"tp": 2, "pp": 2}, {"tp": 4}):
        try:
            found = lab.check(Case(model, layout, SEQUENCE)).wrong
        except PlanError as error:
            found = [] if "no repeated blocks" in error.what or "not divisible" in error.what else [str(error)]
        wrong[str(layout)] = found
    assert not any(wrong.values()), wrong
