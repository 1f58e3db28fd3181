"""Over tp one op computes the products of all blocks that read one value: no block can let go of its own."""

from __future__ import annotations

import pytest

from planner import plan
from planner.frozen_plan import Plan
from tests.models import hugging_face
from tests.tools.simulated_mesh import spec_of


def planned(tp: int) -> Plan:
    return plan(hugging_face.build("t5"), spec_of(hugging_face.batch("t5"), {"tp": tp}, recompute="full"))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("tp", "let_go"), [(1, True), (2, False)])
def test_keys_of_an_encoders_output_are_kept_where_one_op_makes_those_of_all_blocks(tp: int, let_go: bool) -> None:
    made = planned(tp)
    assert made.decisions is not None
    program = made.decisions.program
    again = {call.name for piece in made.recomputed for call in piece.again}
    weights = [n for n, fqn in program.parameters.items() if fqn.endswith(("EncDecAttention.k.weight",))]
    products = {user.name for name in weights for user in program.node(name).users}
    assert len(products) == 2
    assert (products <= again) is let_go
    assert products.isdisjoint(again) is not let_go
