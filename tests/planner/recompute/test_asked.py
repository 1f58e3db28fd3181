"""Which blocks the spec means, and what it cannot mean."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from examples.gpt import build
from passes.errors import SpecError
from planner import PlanError
from planner.spec.spec import Spec
from tests.tools.captures import plan_again

INPUTS = {"input_ids": {"shape": [16], "dtype": "int64", "high": 50}, "targets": {"like": "input_ids"}}
SPEC: dict[str, Any] = {"batch": {"global": 4, "micro": 2}, "mesh": {}, "inputs": INPUTS}


def kinds(asked: Any) -> dict[str, str]:
    return {row.block: row.kind for row in plan_again(build(), {**SPEC, "recompute": asked}).recompute}


@pytest.mark.thorough
def test_the_last_glob_that_names_a_block_decides_and_others_keep_all():
    blocks = list(kinds("full"))
    assert len(blocks) > 1
    assert set(kinds("full").values()) == {"full"}
    assert kinds({"*": "selective", blocks[0]: "full"}) == {
        b: "full" if b == blocks[0] else "selective" for b in blocks
    }
    assert kinds({"*": "full", blocks[0]: "none"}) == dict.fromkeys(blocks[1:], "full")
    assert kinds({blocks[1]: "full"}) == {blocks[1]: "full"}
    assert kinds({}) == kinds("none") == {}


def test_a_glob_that_names_no_block_is_an_error_with_the_nearest_names():
    with pytest.raises(PlanError) as error:
        plan_again(build(), {**SPEC, "recompute": {"layer.*": "full"}})
    assert "recompute: `layer.*` matches no block" in str(error.value)
    assert all(name in (error.value.fix or "") for name in list(kinds("full"))[:2])


@pytest.mark.parametrize("asked", ["ful", {"*": "ful"}, 3, [], {"*": ["full"]}])
def test_an_unknown_kind_is_an_error_at_its_place(asked: Any):
    with pytest.raises(SpecError) as error:
        Spec.load({**SPEC, "recompute": asked})
    assert "recompute" in str(error.value)
    assert "full" in str(error.value)


def test_graphs_of_transformer_engine_are_refused():
    with pytest.raises(SpecError, match="transformer_engine"):
        Spec.load({**SPEC, "recompute": "full", "cuda_graphs": {"impl": "transformer_engine"}})


def test_a_model_without_blocks_is_an_error():
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    inputs = {"x": {"shape": [4], "dtype": "float32"}}
    with pytest.raises(PlanError, match="no repeated blocks"):
        plan_again(Single(), {**SPEC, "inputs": inputs, "recompute": "full"})
