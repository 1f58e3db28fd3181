"""What every family of the zoo must show, captured once: a rule for every op with a gradient, its experts."""

import pytest

from passes.moe.find import find_experts
from tests.models.hugging_face import ZOO, batch, build
from tests.tools.captures import program_again
from tests.tools.without_rule import without_rule

pytest.importorskip("transformers")

# All others have none; deepseek-v3 has one layer in two.
LAYERS_OF_EXPERTS = {"mixtral": 2, "qwen2_moe": 2, "qwen3_moe": 2, "deepseek_v3": 1, "gpt_oss": 2}


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_op_with_a_gradient_has_a_rule_and_no_family_has_experts_but_those_that_do(name: str):
    program = program_again(build(name), batch(name))
    assert not without_rule(program)
    assert sum(node.op == "call_function" for node in program.graph.graph.nodes) >= 60
    found = find_experts(program)
    assert found.doubts == ()
    assert len(found.layers) == LAYERS_OF_EXPERTS.get(name, 0)


def test_families_with_experts_are_in_the_zoo():
    assert LAYERS_OF_EXPERTS.keys() <= ZOO.keys()
