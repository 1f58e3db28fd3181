"""Which blocks are recomputed as the spec asks, and what a block of GPT-2's size keeps."""

from functools import cache
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from examples.gpt import build
from passes.errors import PlanError, SpecError
from planner import Plan, plan
from planner.recompute.decide import RecomputeRow
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of


@cache
def planned(kind: str, tp: int = 1, dropout: float = 0.0) -> Plan:
    transformers = pytest.importorskip("transformers")
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, **drop)).train()
    given: dict[str, Any] = {"shape": [512], "dtype": "int64", "high": 50257}
    spec = {
        "mesh": {"tp": tp},
        "batch": {"global": 1, "micro": 1},
        "inputs": dict.fromkeys(("input_ids", "labels"), given),
    }
    return plan(model, {**spec, "recompute": kind})


def shown(rows: tuple[RecomputeRow, ...]) -> str:
    first = [row for row in rows if row.block == rows[0].block]
    return "\n".join(f"{r.ops:<46} {r.bytes:>11,} {r.flops:>15,} {r.moved:>11,}" for r in first)


@pytest.mark.thorough
def test_selective_gives_back_what_is_cheap_for_its_bytes():
    assert_expected_inline(
        shown(planned("selective").recompute),
        """\
layer_norm                                       1,572,864               0   3,151,872
layer_norm                                       1,572,864               0   3,151,872
mul, pow, mul, add, mul, tanh, add, mul         25,165,824               0 113,246,208""",
    )


def test_selective_gives_back_scores_and_masks_of_attention_with_dropout():
    assert_expected_inline(
        shown(planned("selective", dropout=0.1).recompute),
        """\
layer_norm                                       1,572,864               0   3,151,872
scaled_dot_product_attention, contiguous        42,467,328     805,306,368   9,437,184
layer_norm                                       1,572,864               0   3,151,872
mul, pow, mul, add, mul, tanh, add, mul         25,165,824               0 113,246,208""",
    )


def test_full_gives_back_all_but_the_inputs_of_the_block_and_not_its_last_product():
    assert_expected_inline(
        shown(planned("full", tp=2).recompute),
        """\
layer_norm                                       1,576,960               0   3,151,872
mm, add                                          2,359,296     905,969,664   7,475,712
scaled_dot_product_attention                       798,720     402,653,184   3,145,728
mm, g, add                                               0     301,989,888   6,687,744
add                                              1,572,864               0   4,718,592
layer_norm                                       1,576,960               0   3,151,872
mm, add                                          3,145,728   1,207,959,552   9,443,328
mul, pow, mul, add, mul, tanh, add, mul         12,582,912               0  56,623,104""",
    )


def test_equal_blocks_let_the_same_go():
    for kind in ("full", "selective"):
        rows = planned(kind).recompute
        blocks = sorted({row.block for row in rows})
        of_block = [[(r.ops, r.bytes, r.flops, r.moved) for r in rows if r.block == b] for b in blocks]
        assert len(of_block) == 2
        assert of_block[0] == of_block[1]


@pytest.mark.thorough
def test_the_plan_shows_it_and_saves_it(tmp_path: Any):
    made = planned("full", tp=2)
    assert "Recompute" in made.describe()
    assert "backward, again" in made.describe()
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert loaded.describe() == made.describe()
    assert made.hash() != planned("none", tp=2).hash()


# ---- which blocks the spec means, and what it cannot mean


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


# ---- over tp one op computes the products of all blocks that read one value: no block can let go of its own


def t5(tp: int) -> Plan:
    return plan(hugging_face.build("t5"), spec_of(hugging_face.batch("t5"), {"tp": tp}, recompute="full"))


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("tp", "let_go"), [(1, True), (2, False)])
def test_keys_of_an_encoders_output_are_kept_where_one_op_makes_those_of_all_blocks(tp: int, let_go: bool) -> None:
    made = t5(tp)
    assert made.decisions is not None
    program = made.decisions.program
    again = {call.name for piece in made.recomputed for call in piece.again}
    weights = [n for n, fqn in program.parameters.items() if fqn.endswith(("EncDecAttention.k.weight",))]
    products = {user.name for name in weights for user in program.node(name).users}
    assert len(products) == 2
    assert (products <= again) is let_go
    assert products.isdisjoint(again) is not let_go
