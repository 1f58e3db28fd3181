"""A plan's row is of all ranks of a stage: experts that stand alone must exchange over etp what the others do."""

from __future__ import annotations

import pytest

from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_that_train_on_one_ep_rank_alone_exchange_what_the_others_do(etp: int) -> None:
    spec = spec_of("loop of experts", mesh={"dp": 4, "ep": 2, "etp": etp})
    rows = []
    for frozen in (False, True):
        model = build("loop of experts")
        for parameter in model.get_submodule("layer.experts.3").parameters():
            parameter.requires_grad_(not frozen)
        made = plan_again(model, spec)
        rows.append([row for row in made.collectives if row.per == "microbatch"])
    assert rows[0] == rows[1]
