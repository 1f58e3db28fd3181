"""What a block of GPT-2's size keeps and computes again: norms, activations and scores, no product with weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from planner import Plan, plan
from planner.recompute.decide import RecomputeRow


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
