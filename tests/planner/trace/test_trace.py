"""What the trace of a stage says is kept, beside what autograd keeps of the lowered stage: to the byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from passes.ops.vocabulary import cross_entropy_in_place
from planner.trace.lowered import Lowered
from planner.trace.observe import Like, Operand, observe
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


aten = torch.ops.aten
X, Y = Operand(0), Operand(1)


def like(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Like:
    return Like.contiguous(shape, dtype, grad)


def test_a_product_keeps_what_the_gradient_of_the_other_operand_reads() -> None:
    assert observe(aten.mul.Tensor, (X, Y), {}, [like(2, 3), like(3)]).operands == (0, 1)
    assert observe(aten.mul.Tensor, (X, Y), {}, [like(2, 3), like(3, grad=False)]).operands == (1,)
    assert observe(aten.mul.Tensor, (X, 2.0), {}, [like(2, 3)]).operands == ()


def test_softmax_keeps_its_result_and_a_norm_two_hidden_tensors() -> None:
    assert observe(aten.softmax.int, (X, -1), {}, [like(2, 8)]).results == (0,)
    norm = observe(aten.layer_norm.default, (X, [8], Y), {}, [like(4, 8), like(8)])
    assert (norm.operands, norm.hidden) == ((0, 1), (4 * 4, 4 * 4))


def test_a_reshape_shares_memory_where_the_strides_allow_it() -> None:
    (view,) = observe(aten.reshape.default, (X, [4, 6]), {}, [like(2, 2, 6)]).made
    (copy,) = observe(aten.reshape.default, (X, [2, 12]), {}, [Like((2, 3, 4), (12, 1, 3), torch.float32)]).made
    assert (view.shares, copy.shares) == (0, None)
    assert copy.bytes == 2 * 12 * 4


def test_pieces_of_a_split_share_the_memory_of_the_whole() -> None:
    seen = observe(aten.split_with_sizes.default, (X, [2, 6], -1), {}, [like(3, 8)])
    assert seen.is_tuple
    assert [made.shares for made in seen.made] == [0, 0]


def test_attention_keeps_no_scores_but_with_dropout_it_does() -> None:
    given = [like(1, 2, 16, 8) for _ in range(3)]
    arguments = (X, Y, Operand(2))
    fused = observe(aten.scaled_dot_product_attention.default, (*arguments, None, 0.0, True), {}, given)
    by_parts = observe(aten.scaled_dot_product_attention.default, (*arguments, None, 0.1, True), {}, given)
    scores = 2 * 16 * 16 * 4
    assert fused.operands == (0, 1, 2)
    assert sum(fused.hidden) == 2 * 16 * 4  # a logarithm for each row
    assert sum(by_parts.hidden) > 2 * scores


def test_what_has_no_gradient_keeps_nothing() -> None:
    seen = observe(aten.mul.Tensor, (X, Y), {}, [like(2, 3, grad=False), like(3, grad=False)])
    assert (seen.operands, seen.results, seen.hidden) == ((), (), ())
    assert not seen.made[0].like.requires_grad


def test_a_loss_that_overwrites_its_logits_is_seen_to() -> None:
    given = [like(4, 8), like(4, dtype=torch.int64, grad=False)]
    assert observe(cross_entropy_in_place, (X, Y), {}, given).overwritten == (0,)
    assert observe(aten.cross_entropy_loss.default, (X, Y), {}, given).overwritten == ()


def test_one_and_true_are_different_constants() -> None:
    kept = observe(aten.sum.dim_IntList, (X, [1], True), {}, [like(2, 3)])
    assert kept.made[0].like.shape == (2, 1)
    assert observe(aten.sum.dim_IntList, (X, [True], False), {}, [like(2, 3)]).made[0].like.shape == (2,)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        root = x.abs().sqrt()
        ctx.save_for_backward(root, x[:1])
        return root * root


def test_a_function_with_a_backward_of_its_own_keeps_what_it_saves() -> None:
    seen = observe(Squares.apply, (X,), {}, [like(4, 8)])
    assert (seen.operands, seen.hidden) == ((0,), (4 * 8 * 4,))
