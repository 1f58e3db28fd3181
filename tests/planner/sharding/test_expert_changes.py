"""A plan's row is of all ranks of a stage: experts that stand alone must exchange over etp what the others do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes.moe.domain import domain_of
from passes.partition.type_changes import TypeChange, check_experts_alike
from passes.types.conversions import conversion
from passes.types.types import I, P
from planner import PlanError
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again


def test_an_exchange_of_one_ep_ranks_experts_alone_is_refused_at_its_line() -> None:
    made = plan_again(build("loop of experts"), spec_of("loop of experts", mesh={"dp": 4, "ep": 2, "etp": 2}))
    program = made.to_run()[0].program
    of_expert = {d.number: n for n in program.graph.graph.nodes if (d := domain_of(n)) is not None and d.number >= 0}
    how = conversion(P, I, grad=True, parameter=False, exchange=True)
    assert how is not None
    first = TypeChange(0, of_expert[0].name, P, I, how, ("reader",), "etp")
    last = replace(first, value=of_expert[3].name)
    check_experts_alike([[first, last]], program, made.mesh)
    with pytest.raises(PlanError, match="experts on different ep ranks would run different collectives") as caught:
        check_experts_alike([[first]], program, made.mesh)
    assert "experts.py:" in str(caught.value.where)
