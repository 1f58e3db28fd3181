"""A plan's row is of all ranks of a stage: experts that stand alone must exchange over etp what the others do."""

from __future__ import annotations

import pytest

from planner import PlanError
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_that_train_on_one_ep_rank_alone_are_refused_over_etp_at_their_line(etp: int) -> None:
    model, spec = build("loop of experts"), spec_of("loop of experts", mesh={"dp": 4, "ep": 2, "etp": etp})
    for parameter in model.get_submodule("layer.experts.3").parameters():
        parameter.requires_grad_(False)
    if etp == 1:
        plan_again(model, spec)
        return
    with pytest.raises(PlanError, match="experts on different ep ranks would run different collectives") as caught:
        plan_again(model, spec)
    assert "experts.py:" in str(caught.value.where)
