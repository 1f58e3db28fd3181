"""RULES: op → its effect on the dims of its operands. An op that is not here, and is not pointwise, has no rule."""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from planner.graph.ops.aten import aten, is_pointwise, packet_of
from planner.graph.ops.sequence import causal_attention
from planner.rules import along, attention, indexing, products, spatial, views
from planner.rules.call import Call, call_of
from planner.rules.factors import EACH, Factors
from planner.rules.products import Builder
from planner.rules.rule import RESULT, OpRule


def rule_of(node: fx.Node) -> OpRule | None:
    """The rule of a call; None for an op without one, or one that is called in a way which its rule does not know."""
    builder = RULES.get(packet_of(node.target))
    if builder is None and "grouped_mm" in str(node.target):
        builder = products.grouped  # of transformers, without the kernel
    if builder is None and is_pointwise(node.target):
        builder = along.elementwise
    call = call_of(node) if builder is not None else None
    return builder(call) if builder is not None and call is not None else None


def item(call: Call) -> OpRule | None:
    """One tensor of a tuple: the dims in which it is as the first, but for those that its op makes anew (split)."""
    if len(call.shapes[0]) != len(call.result):
        return None
    source = rule_of(call.operands[0])
    factors = Factors(call)
    for dim in range(len(call.result)):
        factor = source.sole(RESULT, dim) if source is not None else None
        is_new = factor is not None and {p.operand for p in factor.places} == {RESULT} and factor.role is not EACH
        if not is_new and call.shapes[0][dim] == call.result[dim]:
            factors.add(EACH, (0, dim), (RESULT, dim))
    return factors.done()


def _packets(names: str, builder: Builder) -> dict[Any, Builder]:
    """Those of the ops that this PyTorch has."""
    return {getattr(aten, name): builder for name in names.split() if hasattr(aten, name)}


RULES: dict[Any, Builder] = (
    # products
    _packets("linear", products.linear)
    | _packets("mm bmm matmul mv dot", products.matmul)
    | _packets("addmm", products.addmm)
    | _packets("baddbmm", products.baddbmm)
    | _packets("einsum", products.einsum)
    | _packets("_grouped_mm", products.grouped)
    | _packets("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d", spatial.convolution)
    | _packets("scaled_dot_product_attention", attention.attention)
    | {causal_attention: attention.attention}
    # by elements, beside those that PyTorch tags
    | _packets("alias dropout feature_dropout native_dropout _to_copy lift_fresh_copy", along.elementwise)
    | _packets("zeros_like ones_like full_like empty_like rand_like randn_like bernoulli exponential", along.like)
    | _packets("type_as", along.shaped_like)
    | _packets("zeros ones full empty new_zeros new_ones new_full new_empty rand randn", along.new)
    # along dims
    | _packets("softmax _softmax log_softmax _log_softmax _safe_softmax", along.kept)
    | _packets("cumsum cumprod logcumsumexp cummax cummin", along.kept)
    | _packets("topk sort argsort flip roll diff glu", along.apart)
    | _packets("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft", along.apart)
    | _packets("slice narrow split split_with_sizes chunk cat concat concatenate msort", along.along_first)
    | _packets("tril triu", along.last_two)
    | _packets("layer_norm rms_norm native_layer_norm _fused_rms_norm", along.norm)
    | _packets("sum nansum count_nonzero", along.total)
    | _packets("mean nanmean amax amin max min argmax argmin aminmax median logsumexp prod any all", along.mixed)
    | _packets("var std var_mean std_mean norm linalg_vector_norm", along.mixed)
    | _packets("select unbind", along.selected)
    | _packets("stack", along.stack)
    | _packets("pad constant_pad_nd", along.padded)
    | _packets("unfold", along.unfold)
    # views
    | _packets("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as", views.reshape)
    | _packets("permute transpose t movedim moveaxis swapaxes swapdims numpy_T mT adjoint", views.permute)
    | _packets("expand expand_as", along.shaped_like)
    | _packets("repeat", views.repeat)
    | _packets("view_as_complex view_as_real", views.complex_pair)
    # indexing
    | _packets("embedding", products.embedding)
    | _packets("gather", indexing.gather)
    | _packets("index_select", indexing.index_select)
    | _packets("index", indexing.index)
    | _packets("scatter scatter_add scatter_reduce", indexing.scatter)
    | _packets("index_add index_copy", indexing.index_add)
    | _packets("index_put", indexing.index_put)
    | _packets("one_hot", indexing.one_hot)
    # images
    | _packets("batch_norm instance_norm", spatial.batch_norm)
    | _packets("group_norm", spatial.group_norm)
    | _packets("avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d", spatial.pool(1))
    | _packets("avg_pool2d max_pool2d adaptive_avg_pool2d adaptive_max_pool2d", spatial.pool(2))
    | _packets("avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d", spatial.pool(3))
    | {getitem: item}
)
