"""Models whose regions were hard to find give with them what they give eagerly, to the last bit."""

from __future__ import annotations

import pytest

from tests.runtime.cuda_graphs.test_emulate import SCOPES, differences, engine_of, train


@pytest.mark.parametrize("name", ["einsum", "t5-gated"])
def test_regions_that_leave_something_outside_give_what_they_give_eagerly(name):
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in SCOPES:
        with (made := engine_of(name, scope))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            assert engine.graphs is not None
            assert all(row.captured for row in engine.plan.graph_regions)
            assert engine.graphs.num_graphs == engine.plan.graph_slots[0].num_graphs
