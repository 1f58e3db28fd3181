"""Drawn experts in bfloat16 and float16: a steady router chooses the same ones however its scores are rounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.fuzz.forks import prepare
from runtime.fuzz.run import Outcome, Verdict
from tests.fuzz.drawing import campaign_of, case_with

MESHES = {"ep": {"mesh.dp": 2, "mesh.ep": 2}, "tp": {"mesh.tp": 2}, "cp": {"mesh.cp": 2}}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("axis", MESHES)
@pytest.mark.parametrize("kind", ["rows", "dense", "stacked"])
def test_experts_train_in_half_precision_as_in_one_process(kind: str, axis: str, half: str, tmp_path: Path):
    prepare()
    given = {"precision.parameters": "bfloat16", "half precision": half, "precision.loss_scale": "dynamic"}
    case = case_with({"experts": kind, "routing": "steady"}, MESHES[axis] | given).sensible(2)
    assert case.to_spec()["precision"]["parameters"] == half
    assert campaign_of(0, 2, tmp_path).outcome_of(case) == Outcome(Verdict.EQUAL)


def test_routers_that_follow_rounded_scores_are_not_drawn_in_half_precision():
    case = case_with({"experts": "rows"}, {"precision.parameters": "bfloat16"}).sensible(2)
    assert case.to_spec()["precision"]["parameters"] == "float32"
