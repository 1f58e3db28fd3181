"""What the trace of a stage says is kept, beside what autograd keeps of the lowered stage: to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.trace.lowered import Lowered
from tests.models import hugging_face
from tests.models.families import FAMILIES, build
from tests.tools.saved_memory import kept_bytes, measured

SEQUENCE = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp1": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sp": ({"tp": 2}, SEQUENCE),
    "cp2": ({"cp": 2}, {}),
    "tp2-cp2": ({"tp": 2, "cp": 2}, SEQUENCE),
}


def check(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    made, ranks = measured(make, batch, mesh, **more)
    trace = Lowered(made.decisions, made.shards).trace(0)
    assert not trace.unseen
    assert [kept.total for kept in ranks] == [kept_bytes(trace)] * made.mesh.world_size


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "gpt_neox", "bloom", "opt", "falcon_mqa"])
def test_kept_bytes_are_those_that_autograd_keeps(family: str, layout: str) -> None:
    check(lambda: hugging_face.build(family), hugging_face.batch(family), layout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", ["layers.0.", "mlp", "q_proj"])
def test_a_product_with_a_frozen_weight_keeps_no_input(frozen: str, layout: str) -> None:
    def make() -> nn.Module:
        model = hugging_face.build("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return model

    check(make, hugging_face.batch("llama"), layout)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_dropout_and_the_scores_behind_it_are_counted(layout: str) -> None:
    torch.manual_seed(0)
    entry = FAMILIES["gpt2-dropout"]()
    check(lambda: FAMILIES["gpt2-dropout"]().model, entry.batch(2, 0), layout)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_with_padding_keep_as_much_as_others(tp: int) -> None:
    entry = build("uneven:decoder of 15")
    made, ranks = measured(lambda: build("uneven:decoder of 15").model, entry.batch(2, 0), {"tp": tp}, **SEQUENCE)
    trace = Lowered(made.decisions, made.shards).trace(0)
    assert [kept.total for kept in ranks] == [kept_bytes(trace)] * tp


@pytest.mark.thorough
def test_an_op_in_two_captured_regions_is_counted_as_lowered():
    """Attention and MLP of a parallel residual read one f. In two graphs it stays apart from the products after it."""
    graphs = {"impl": "emulate", "scope": ["attn", "mlp"]}
    made, ranks = measured(
        lambda: hugging_face.build("gpt_neox"), hugging_face.batch("gpt_neox"), {"tp": 2}, cuda_graphs=graphs
    )
    assert made.regions
    trace = Lowered(made.decisions, made.shards, made.regions).trace(0)
    assert [kept.total for kept in ranks] == [kept_bytes(trace)] * 2
