"""Weights that a closure, a hook, a partial or a view holds train as in one process; the one process is no copy."""

from __future__ import annotations

import pytest

from tests.models.held_weights import HELD_WEIGHTS
from tests.tools.laboratory import Case, Lab

LAYOUTS = {"one-rank": {"dp": 1}, "tp2-pp2": {"tp": 2, "pp": 2}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", HELD_WEIGHTS)
def test_held_weights_train_as_in_one_process(lab: Lab, model: str, layout: str) -> None:
    case = Case(model, LAYOUTS[layout])
    report = lab.check(case)
    assert report.wrong == []
    assert [p.name for p in lab.plan(case).parameters if "gradient" in p.reason and "no" in p.reason.split()] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["tied-in-lambda", "tied-in-partial"])
def test_a_head_tied_by_a_closure_is_one_parameter_on_both_stages(lab: Lab, model: str) -> None:
    rows = [p for p in lab.plan(Case(model, LAYOUTS["tp2-pp2"])).parameters if p.style == "vocab"]
    assert [(row.name, row.stages) for row in rows] == [("tokens.weight", (0, 1))]
