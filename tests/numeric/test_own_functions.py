"""Functions with a backward of their own train as in one process, whole or cut, between stages, along the sequence."""

from __future__ import annotations

import pytest

from tests.models.own_functions import FUNCTIONS
from tests.numeric.test_sequence_parallel import SEQUENCE_PARALLEL
from tests.tools.laboratory import Case, Lab

LAYOUTS = {
    "tp2-pp2": ({"tp": 2, "pp": 2}, {}),
    "sequence": ({"tp": 2, "dp": 2}, SEQUENCE_PARALLEL),
}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FUNCTIONS)
def test_own_backward_equals_one_process(lab: Lab, model: str, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    assert lab.check(Case(model, mesh, rest)).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["own-round", "own-sign", "own-reversed", "own-clamped"])
def test_elementwise_functions_are_cut_and_repeat_with_their_blocks(lab: Lab, model: str) -> None:
    plan = lab.plan(Case(model, {"tp": 2}))
    told = [row for row in plan.diagnostics if "custom Function" in row.what]
    assert len(told) == 4
    assert all("sharded over dim 2" in row.what and "own_functions.py" in row.where for row in told)
    assert plan.summary.flops_sharded_fraction == 1.0


def test_a_function_over_all_features_is_computed_alike_and_says_so(lab: Lab) -> None:
    plan = lab.plan(Case("own-unit", {"tp": 2}))
    told = {row.what for row in plan.diagnostics if "custom Function" in row.what}
    assert told == {
        "UnitGradient(_) is a custom Function with its own backward: one op, replicated on every rank; "
        "its backward is not linear and needs complete gradients"
    }
