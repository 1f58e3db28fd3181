"""Every rule on numbers: each factor cut in parts, by values and gradients. Every op of the table has an example."""

import operator
import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from passes.program.ops.aten import aten, is_random, ops_named, packet_of
from passes.program.ops.ctc import CTC_LOSSES
from passes.program.ops.sequence import causal_attention, gather_sequence, local_rows, sum_over_ranks
from passes.rules.notation import parse
from passes.rules.rule import RESULT, Factor, OpRule, Place, Role, operands_of
from passes.rules.table import RULES, rule_of
from passes.rules.trials import TOLERANCES, called, tried


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int, below: int = 4) -> Tensor:
    return torch.randint(below, shape)


def two_layers(gates: int, num_inputs: int, hidden: int) -> list[Tensor]:
    size = gates * hidden
    return [real(*shape) for n in (num_inputs, hidden) for shape in ((size, n), (size, hidden), (size,), (size,))]


EACH_OF_ONE = {
    "kept": [(real(4, 6, 2), 1)],
    "whole": [(real(4, 6),)],
}
EXAMPLES: dict[Any, list[tuple[Any, ...]]] = {
    aten.cross_entropy_loss.default: [
        (real(6, 4), ids(6), None, 0),
        (real(6, 4), ids(6), None, 1),
        (real(6, 4, 2), ids(6, 2), None, 2),
        (real(6, 4), real(6, 4).softmax(-1), None, 0),
        (real(4), ids(), None, 2),
    ],
    aten.nll_loss_nd.default: [(real(6, 4, 2), ids(6, 2), None, 0), (real(6, 4), ids(6), None, 2)],
    CTC_LOSSES: [
        (real(5, 4, 3).log_softmax(-1), ids(4, 2, below=2) + 1, ids(4, below=1) + 5, ids(4, below=2) + 1, 0, False)
    ],
    aten.linear.default: [(real(2, 6, 4), real(6, 4)), (real(2, 4), real(6, 4), real(6)), (real(2, 4), real(4))],
    aten.mm.default: [(real(4, 6), real(6, 2))],
    aten.bmm.default: [(real(4, 6, 2), real(4, 2, 6))],
    aten.matmul.default: [
        (real(2, 4, 6), real(6, 3)),
        (real(2, 1, 4, 6), real(3, 6, 2)),
        (real(4, 6), real(6)),
        (real(6), real(6)),
        (real(6), real(2, 6, 4)),
    ],
    aten.mv.default: [(real(4, 6), real(6))],
    aten.dot.default: [(real(6), real(6))],
    aten.addmm.default: [(real(4, 2), real(4, 6), real(6, 2)), (real(2), real(4, 6), real(6, 2))],
    aten.baddbmm.default: [(real(2, 4, 1), real(2, 4, 6), real(2, 6, 3))],
    aten.addmv.default: [(real(4), real(4, 6), real(6)), (real(), real(4, 6), real(6))],
    aten.addbmm.default: [(real(4, 2), real(3, 4, 6), real(3, 6, 2)), (real(2), real(3, 4, 6), real(3, 6, 2))],
    aten.einsum.default: [
        ("bsi,oi->bso", [real(2, 3, 4), real(6, 4)]),
        ("...ij,jk", [real(2, 3, 4), real(4, 6)]),
        ("ij,kj,k->ik", [real(2, 4), real(6, 4), real(6)]),
    ],
    aten.conv1d.default: [
        (real(2, 4, 9), real(6, 4, 3)),
        (real(2, 4, 9), real(6, 2, 3), real(6), [1], [0], [1], 2),
        (real(4, 9), real(6, 4, 3), real(6)),
    ],
    aten.conv2d.default: [(real(2, 4, 5, 6), real(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4)],
    aten.convolution.default: [
        (real(2, 4, 5, 6), real(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1),
        (real(2, 4, 5, 6), real(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [0, 0], 2),
    ],
    aten.conv3d.default: [(real(2, 4, 3, 3, 3), real(6, 4, 2, 2, 2))],
    aten.conv_transpose1d.default: [(real(2, 4, 9), real(4, 6, 3))],
    aten.conv_transpose3d.input: [(real(2, 4, 3, 3, 3), real(4, 6, 2, 2, 2))],
    aten.conv_transpose2d.input: [(real(2, 4, 5, 5), real(4, 6, 3, 3), real(6))],
    aten.scaled_dot_product_attention.default: [
        (real(2, 4, 5, 6), real(2, 4, 7, 6), real(2, 4, 7, 2)),
        (real(2, 4, 6, 6), real(2, 4, 6, 6), real(2, 4, 6, 2), None, 0.0, True),
        (real(2, 4, 4, 6), real(2, 4, 6, 6), real(2, 4, 6, 2), real(4, 4, 6)),
        (real(4, 4, 6), real(4, 6, 6), real(4, 6, 2), real(4, 6)),
        (real(2, 8, 4, 6), real(2, 4, 6, 6), real(2, 4, 6, 2), real(2, 8, 4, 6), {"enable_gqa": True}),
    ],
    aten.add.Tensor: [(real(4, 6), real(6)), (real(4, 1), real(6)), (real(4, 6), 2.0)],
    aten.subtract.Tensor: [(real(4, 6), real(6))],
    aten.rsub.Tensor: [(real(4, 6), real(6))],
    aten.multiply.Tensor: [(real(4, 6), real(6))],
    aten.divide.Tensor: [(real(4, 6), real(6))],
    aten.true_divide.Tensor: [(real(4, 6), real(6))],
    aten.div.Tensor_mode: [(real(4, 6), real(6), {"rounding_mode": "floor"})],
    aten.to.dtype: [(real(4, 6), torch.float64)],
    aten.where.self: [(real(4, 6) > 0, real(6), real(4, 1))],
    aten.alias.default: EACH_OF_ONE["whole"],
    aten._to_copy.default: EACH_OF_ONE["whole"],
    aten.lift_fresh_copy.default: EACH_OF_ONE["whole"],
    aten.dropout.default: [(real(4, 6), 0.5, False)],
    aten.feature_dropout.default: [(real(4, 6), 0.5, False)],
    aten.native_dropout.default: [(real(4, 6), 0.5, True)],
    aten.type_as.default: [(real(4, 6), real(3))],
    aten.expand.default: [(real(4, 1, 6), [2, 4, 3, 6])],
    aten.expand_as.default: [(real(4, 1), real(4, 1))],
    aten.new_zeros.default: [(real(4, 6), [2, 6])],
    aten.zeros.default: [([4, 6],)],
    aten.softmax.int: EACH_OF_ONE["kept"],
    aten._softmax.default: [(real(4, 6, 2), 1, False)],
    aten._log_softmax.default: [(real(4, 6, 2), -1, False)],
    aten.topk.default: [(real(4, 6), 2), (real(4, 6), 2, 0)],
    aten.msort.default: EACH_OF_ONE["whole"],
    aten.flip.default: [(real(4, 6, 2), [0, 2])],
    aten.roll.default: [(real(4, 6, 2), [1], [1])],
    aten.slice.Tensor: [(real(4, 6), 1, 1, 3)],
    aten.narrow.default: [(real(4, 6), 0, 1, 2)],
    aten.split.Tensor: [(real(4, 6), 2, 1), (real(4, 6), 2)],
    aten.split_with_sizes.default: [(real(4, 6), [2, 4], -1)],
    aten.chunk.default: [(real(4, 6), 2, 1)],
    aten.cat.default: [([real(4, 2), real(4, 6)], 1), ([real(4, 2), real(2, 2)],)],
    aten.concat.default: [([real(4, 2), real(4, 6)], 1)],
    aten.concatenate.default: [([real(4, 2), real(4, 6)], 1)],
    aten.tril.default: [(real(4, 6, 6),)],
    aten.triu.default: [(real(4, 6, 6),)],
    aten.layer_norm.default: [(real(4, 6, 3), [3], real(3), real(3))],
    aten.native_layer_norm.default: [(real(4, 6, 3), [6, 3], None, None, 1e-5)],
    aten.rms_norm.default: [(real(4, 6, 3), [3], real(3))],
    aten._fused_rms_norm.default: [(real(4, 6, 3), [3], real(3), None)],
    aten.max.dim: [(real(4, 6), 1)],
    aten.max.other: [(real(4, 6), real(6))],
    aten.min.default: EACH_OF_ONE["whole"],
    aten.sum.dim_IntList: [(real(4, 6, 2), [0, 2]), (real(4, 6, 2), [1], True), (real(4, 6, 2), [])],
    aten.sum.default: EACH_OF_ONE["whole"],
    aten.nansum.default: [(real(4, 6), [1])],
    aten.count_nonzero.dim_IntList: [(real(4, 6) > 0, [1])],
    aten.prod.dim_int: [(real(4, 6), 1)],
    aten.any.dim: [(real(4, 6) > 0, 1)],
    aten.all.dim: [(real(4, 6) > 0, 1)],
    aten.median.dim: [(real(4, 6), 1)],
    aten.nanmedian.dim: [(real(4, 6), 1)],
    aten.kthvalue.default: [(real(4, 6), 2), (real(4, 6), 2, 0), (real(4, 6), 2, 0, True)],
    aten.mode.default: [(real(4, 6), 0)],
    aten.aminmax.default: [(real(4, 6),)],
    aten.linalg_vector_norm.default: [(real(4, 6), 2, [1])],
    aten.norm.ScalarOpt_dim: [(real(4, 6), 2, [1])],
    aten.select.int: [(real(4, 6, 2), 1, 3)],
    aten.unbind.int: [(real(4, 6, 2), 1)],
    aten.stack.default: [([real(4, 6), real(4, 6)], 1)],
    aten.pad.default: [(real(4, 6, 2), [0, 0, 1, 2])],
    aten.constant_pad_nd.default: [(real(4, 6, 2), [1, 0])],
    aten.unfold.default: [(real(4, 6, 2), 1, 3, 1)],
    aten.diagonal.default: [(real(4, 6, 2, 6), 0, 1, 3), (real(4, 6, 4), 0, -1, 0)],
    **{
        op: [
            (real(2, 3, 5), states, two_layers(gates, 5, 4), True, 2, 0.0, True, False, True),
            (real(3, 2, 5), states, two_layers(gates, 5, 4), True, 2, 0.0, True, False, False),
        ]
        for op, gates, states in (
            (aten.gru.input, 3, real(2, 2, 4)),
            (aten.rnn_tanh.input, 1, real(2, 2, 4)),
            (aten.rnn_relu.input, 1, real(2, 2, 4)),
            (aten.lstm.input, 4, [real(2, 2, 4), real(2, 2, 4)]),
        )
    },
    aten.reshape.default: [
        (real(12, 2), [4, 6]),
        (real(2, 6, 4), [3, 2, 8]),
        (real(4, 3, 1, 2), [4, 6]),
        (real(6, 4), [4, 6]),
        (real(8, 6), [2, 2, 2, 3, 2]),
    ],
    aten.view.default: [(real(4, 6), [2, 2, 6])],
    aten._unsafe_view.default: [(real(4, 6), [24])],
    aten.flatten.using_ints: [(real(4, 6, 2), 1)],
    aten.unflatten.int: [(real(4, 6, 2), 1, [3, 2])],
    aten.squeeze.dim: [(real(4, 1, 6), 1)],
    aten.unsqueeze.default: [(real(4, 6), 1)],
    aten.view_as.default: [(real(4, 1), real(1, 4))],
    aten.reshape_as.default: [(real(4, 1), real(1, 4))],
    aten.permute.default: [(real(4, 6, 2), [2, 0, 1])],
    aten.transpose.int: [(real(4, 6, 2), 0, -1)],
    aten.t.default: EACH_OF_ONE["whole"],
    aten.movedim.int: [(real(4, 6, 2), 0, 2)],
    aten.moveaxis.int: [(real(4, 6, 2), 0, 2)],
    aten.swapaxes.default: [(real(4, 6, 2), 0, 2)],
    aten.swapdims.default: [(real(4, 6, 2), 0, 2)],
    aten.numpy_T.default: EACH_OF_ONE["whole"],
    aten.mT.default: [(real(4, 6, 2),)],
    aten.adjoint.default: [(real(4, 6, 2),)],
    aten.repeat.default: [(real(4, 6), [3, 2, 1])],
    aten.view_as_complex.default: [(real(4, 6, 2),)],
    aten.view_as_real.default: [(torch.view_as_complex(real(4, 6, 2)),)],
    aten.embedding.default: [(real(4, 6), ids(2, 3))],
    aten.gather.default: [(real(4, 6), 1, ids(4, 2)), (real(6, 6), 1, ids(4, 2))],
    aten.index_select.default: [(real(4, 6), 0, ids(2))],
    aten.index.Tensor: [
        (real(4, 6, 2), [None, ids(4)]),
        (real(4, 4, 6), [ids(2, 3), ids(3)]),
        (real(4, 6, 4), [ids(2), None, ids(2)]),
    ],
    aten.scatter.src: [(real(4, 6), 1, torch.arange(2).repeat(4, 1), real(4, 2))],
    aten.scatter_add.default: [(real(4, 6), 1, ids(4, 2), real(4, 2)), (real(4, 6), 1, ids(2, 2), real(4, 2))],
    aten.scatter_reduce.two: [(real(4, 6), 1, ids(4, 2), real(4, 2), "sum")],
    aten.index_add.default: [(real(4, 6), 1, ids(2), real(4, 2))],
    aten.index_copy.default: [(real(4, 6), 1, torch.tensor([0, 3]), real(4, 2))],
    aten.index_put.default: [(real(4, 6), [torch.tensor([0, 3])], real(2, 6)), (real(4, 6), [ids(2)], real(6))],
    aten.one_hot.default: [(ids(4, 6), 4)],
    aten.batch_norm.default: [(real(2, 4, 3), real(4), real(4), None, None, True, 0.1, 1e-5, False)],
    aten.instance_norm.default: [(real(2, 4, 3), real(4), real(4), None, None, True, 0.1, 1e-5, False)],
    aten.group_norm.default: [(real(2, 8, 3), 4, real(8), real(8), 1e-5, False)],
    gather_sequence: [(real(4, 6), 1, 2)],
    local_rows: [(real(4, 6), 1, 2)],
    sum_over_ranks: [(real(4, 6), 2)],
    aten.native_batch_norm.default: [(real(2, 4, 3), real(4), real(4), None, None, True, 0.1, 1e-5)],
    aten._native_batch_norm_legit.no_stats: [(real(2, 4, 3), real(4), real(4), True, 0.1, 1e-5)],
    aten._native_batch_norm_legit_functional.default: [
        (real(2, 4, 3), real(4), real(4), real(4), real(4).exp(), True, 0.1, 1e-5)
    ],
    aten._native_batch_norm_legit_no_training.default: [
        (real(2, 4, 3), real(4), real(4), real(4), real(4).exp(), 0.1, 1e-5)
    ],
    causal_attention: [(real(2, 4, 5, 6), real(2, 4, 7, 6), real(2, 4, 7, 2), 2)],
}
OF_ONE_DIM = "nanmean mean.dim amax amin logsumexp var.correction std.correction var_mean.correction"
FAMILIES: dict[str, list[tuple[Any, ...]]] = {
    "log_softmax.int _safe_softmax cumsum cumprod logcumsumexp cummax cummin": EACH_OF_ONE["kept"],
    OF_ONE_DIM: [(real(4, 6, 2), [1])],
    "std_mean.correction": [(real(4, 6), [1])],
    "sort argsort": [(real(4, 6, 2), 1), (real(4, 6),)],
    "argmax argmin": [(real(4, 6), 1), (real(4, 6),)],
    "diff": [(real(4, 6, 2), 1, 0)],
    "fft_fft fft_rfft fft_irfft": [(real(4, 6, 2), None, 1)],
    "fft_ifft fft_hfft": [(torch.view_as_complex(real(4, 6, 2)),)],
    "glu": [(real(4, 6, 2), 1)],
    "ones empty.memory_format rand randn": [([4],)],
    "new_ones new_empty": [(real(2), [4])],
    "full": [([4], 1.0)],
    "new_full": [(real(2), [4], 1.0)],
    "full_like": [(real(4, 6), 1.0)],
    "_adaptive_avg_pool2d max_pool2d_with_indices": [(real(2, 4, 6, 6), [2, 2])],
    "upsample_nearest1d": [(real(2, 4, 3), [6])],
    "upsample_linear1d": [(real(2, 4, 3), [6], False)],
    "upsample_nearest2d": [(real(2, 4, 3, 3), [6, 6])],
    "upsample_bilinear2d upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa": [
        (real(2, 4, 3, 3), [6, 6], False)
    ],
    "grid_sampler": [(real(2, 4, 3, 3), real(2, 6, 2, 2), 0, 0, False)],
    "zeros_like ones_like empty_like rand_like randn_like bernoulli exponential uniform": [(real(4, 6).sigmoid(),)],
}
for dims in (1, 2, 3):
    pools = " ".join(f"{kind}_pool{dims}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max"))
    FAMILIES[pools] = [(real(2, 4, *[6] * dims), [2] * dims), (real(4, *[6] * dims), [2] * dims)]
EXAMPLES |= {target: given for names, given in FAMILIES.items() for target in ops_named(names)}


@pytest.mark.check
@pytest.mark.parametrize("target", EXAMPLES, ids=lambda target: getattr(target, "__name__", str(target)))
def test_cutting_a_factor_gives_the_parts_of_values_and_gradients(target: Any) -> None:
    for given in EXAMPLES[target]:
        named = given[-1] if isinstance(given[-1], dict) else {}
        node, values = called(target, *(g for g in given if g is not named), **named)
        rule = rule_of(node)
        assert rule is not None
        _tiles(node, rule)
        if not is_random(node) and not any(word in str(target) for word in ("empty", "w_as.", "e_as.")):
            tried(node, rule, values)
            _is_linear(node, rule, values)


def _is_linear(node: fx.Node, rule: OpRule, values: dict[str, Tensor]) -> None:
    """In each set of operands, while the others stay: f(a + b) = f(a) + f(b)."""
    operands = [values[n.name] for n in operands_of(node)]

    def made_of(share: float, together: Collection[int]) -> Tensor:
        scaled = iter([x * share if i in together else x for i, x in enumerate(operands)])
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: next(scaled))  # pyright: ignore
        found: Any = node.target(*args, **kwargs)  # pyright: ignore
        return found if isinstance(found, Tensor) else found[0]

    for together in rule.linear:
        whole, *made = [made_of(share, together) for share in (1.0, 0.25, 0.75)]
        near = TOLERANCES.get(whole.dtype, 0.0)
        torch.testing.assert_close(made[0] + made[1], whole, rtol=near, atol=near, equal_nan=True)


def test_every_op_of_the_table_has_an_example() -> None:
    missing = set(RULES) - {packet_of(target) for target in EXAMPLES} - {operator.getitem, aten._grouped_mm}
    assert not missing


def _tiles(node: fx.Node, rule: OpRule) -> None:
    """The factors of a dim multiply to its size, each with the stride of those further in."""
    value = node.meta["val"]
    tensors = [*enumerate(n.meta["val"] for n in operands_of(node))]
    for operand, x in (*tensors, (RESULT, value if isinstance(value, Tensor) else value[0])):
        for dim, size in enumerate(x.shape):
            step = 1
            for factor in rule.along(operand, dim):
                place = factor.at(operand)
                assert place is not None
                assert place.inner == step, f"{node.target}: {rule}"
                step *= factor.size
            assert step in (size, 1), f"{node.target}: {operand} {dim} {rule}"
            assert step == size or operand in rule.unread or operand != RESULT


def test_rounding_is_not_linear() -> None:
    calls = [(aten.div.Tensor, real(4), real(4)), (aten.to.dtype, real(4), torch.float32)]
    rounded = [(aten.div.Tensor_mode, real(4), real(4)), (aten.to.dtype, real(4), torch.int64)]
    for target, *args in calls:
        assert rule_of(called(target, *args)[0]).linear == (frozenset({0}),)  # pyright: ignore
    for target, *args in rounded:
        mode = {"rounding_mode": "trunc"} if target is aten.div.Tensor_mode else {}
        assert rule_of(called(target, *args, **mode)[0]).linear == ()  # pyright: ignore


def test_a_reshape_without_common_factors_is_mixed() -> None:
    node, _ = called(aten.reshape.default, real(2, 3), [3, 2])
    rule = rule_of(node)
    assert rule is not None
    assert {f.role for f in rule.factors} == {Role.MIX}


def test_an_item_of_a_split_has_a_dim_of_its_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = real(4, 6)
    parts = graph.call_function(aten.split_with_sizes.default, (x, [3, 3], 1))
    parts.meta["val"] = x.meta["val"].split([3, 3], 1)
    piece = graph.call_function(operator.getitem, (parts, 1))
    piece.meta["val"] = parts.meta["val"][1]
    rule = rule_of(piece)
    assert rule is not None
    assert rule.sole(RESULT, 0) == Factor(Role.EACH, 4, (Place(0, 0), Place(RESULT, 0)))
    assert rule.sole(RESULT, 1) == Factor(Role.MIX, 3, (Place(RESULT, 1),))


# ---- the notation of rules: its errors, and how words become factors


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("b s h, o h", 'has not one "->"'),
        ("b -> b -> b", 'has not one "->"'),
        ("b h+ -> b h", '"h+" is summed over and stands in the result'),
        ("b s h -> b s", '"h" is not in the result: mark it "h+" (summed over) or "h^" (mixed)'),
        ("b b -> b", '"b" stands twice in "b b"'),
        ("b h+, h^ -> b", '"h" is marked in two ways'),
        ("b h* -> b", '"h*" is no word of letters'),
        ("b h++ -> b", '"h++" is no word of letters'),
    ],
)
def test_a_text_that_does_not_parse_names_the_word(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


def test_a_mark_holds_for_every_place_of_its_word() -> None:
    pattern = parse("... i+, o i -> ... o")
    assert pattern.roles == {"i": Role.SUM, "o": Role.EACH}
    assert pattern.operands == (("...", "i"), ("o", "i"))
