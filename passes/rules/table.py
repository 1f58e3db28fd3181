"""RULES: op → its effect on the dims of its operands. An op that is not here, and is not pointwise, has no rule."""

from dataclasses import replace
from operator import getitem
from string import ascii_letters
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, is_pointwise, named, packet_of, packets, shape_of
from passes.program.ops.ctc import CTC_LOSSES
from passes.program.ops.groups import is_grouped
from passes.program.ops.sequence import causal_attention, gather_sequence, local_rows, sum_over_ranks
from passes.rules import along, moves, products
from passes.rules.linear import linear_in
from passes.rules.own import own_rule
from passes.rules.products import Builder, text
from passes.rules.rule import EACH, RESULT, Call, Factors, OpRule, call_of, key_of, operands_of


def builder_of(target: Any) -> Builder | None:
    """Return the builder of the rules of an op; None for an op without."""
    builder = RULES.get(packet_of(target))
    if (own := own_rule(target)) is not None:
        return own.rule
    if builder is None and is_grouped(target):
        return products.grouped
    return along.elementwise if builder is None and is_pointwise(target) else builder


def runs_in_steps(target: Any) -> bool:
    """Return whether an op is a recurrence over all steps of a sequence."""
    return RULES.get(packet_of(target)) is along.recurrent


def rule_of(node: fx.Node) -> OpRule | None:
    """The rule of a call; None for an op without one, or one that is called in a way which its rule does not know."""
    call = key_of(node) if node.target is not getitem else None  # the rule of an item follows from its source
    if call is None:
        return _made(node)
    own = own_rule(node.target)
    key = call, str(node.meta.get("inferred")), own and own.text
    if key not in _MADE:
        if len(_MADE) >= MOST_MADE:
            _MADE.clear()
        _MADE[key] = _made(node)
    return _MADE[key]


_MADE: dict[Any, OpRule | None] = {}
MOST_MADE = 20_000


def _made(node: fx.Node) -> OpRule | None:
    pattern = node.meta.get("inferred")
    builder = products.text_of(pattern) if pattern is not None else builder_of(node.target)
    call = call_of(node) if builder is not None else None
    rule = builder(call) if builder is not None and call is not None else None
    if call is None or rule is None:
        return None
    packet = aten._grouped_mm if is_grouped(node.target) else packet_of(node.target)
    return replace(rule, linear=linear_in(call, packet))


def equation(node: fx.Node) -> tuple[list[fx.Node], list[str], str] | None:
    """Return a product as an einsum: operands, their labels and those of the result, one a factor. None without a rule.

    A dim of size 1 that is broadcast has a label of its own.
    """
    rule, operands = rule_of(node), operands_of(node)
    if rule is None:
        return None
    label, free = dict(zip(rule.factors, ascii_letters, strict=False)), reversed(ascii_letters)

    def word(place: int, value: fx.Node) -> str:
        along = [rule.along(place, dim) for dim in range(len(shape_of(value)))]
        return "".join(label[factors[0]] if factors else next(free) for factors in along)

    *words, out = (word(place, value) for place, value in (*enumerate(operands), (RESULT, node)))
    return list(operands), words, out


def item(call: Call) -> OpRule | None:
    """One tensor of a tuple: the dims in which it is as the first, but for those that its op makes anew (split)."""
    if len(call.shapes[0]) != len(call.result):
        return None
    source = rule_of(call.operands[0])
    factors = Factors(call)
    if runs_in_steps(call.operands[0].target) and call.node.args[1] != 0:
        factors.add(EACH, (0, 0 if named(call.operands[0])["batch_first"] else 1), (RESULT, 1))  # a last state
        return factors.done()
    for dim in range(len(call.result)):
        factor = source.sole(RESULT, dim) if source is not None else None
        is_new = factor is not None and {p.operand for p in factor.places} == {RESULT} and factor.role is not EACH
        if not is_new and call.shapes[0][dim] == call.result[dim]:
            factors.add(EACH, (0, dim), (RESULT, dim))
    return factors.done()


POOLS = {  # over the last dims
    1: text("... w^ -> ... q^"),
    2: text("... h^ w^ -> ... p^ q^"),
    3: text("... d^ h^ w^ -> ... o^ p^ q^"),
}
RULES: dict[Any, Builder] = (
    # products
    packets("linear", products.linear)
    | packets("mm bmm matmul mv dot", products.matmul)
    | packets("addmm", products.addmm)
    | packets("baddbmm", products.baddbmm)
    | packets("addmv", products.addmv)
    | packets("addbmm", products.addbmm)
    | packets("einsum", products.einsum)
    | packets("_grouped_mm", products.grouped)
    | packets("conv1d conv2d conv3d convolution", products.convolution)
    | packets("conv_transpose1d conv_transpose2d conv_transpose3d", products.convolution)
    | packets("scaled_dot_product_attention", products.attention)
    | {causal_attention: products.attention}
    # over cp
    | dict.fromkeys((gather_sequence, local_rows), along.of_sequence)
    | {sum_over_ranks: along.elementwise}
    # by elements, beside those that PyTorch tags
    | packets("alias dropout feature_dropout native_dropout _to_copy lift_fresh_copy", along.elementwise)
    | packets("zeros_like ones_like full_like empty_like rand_like randn_like", along.like)
    | packets("bernoulli exponential uniform", along.like)
    | packets("type_as expand expand_as", along.shaped_like)
    | packets("zeros ones full empty new_zeros new_ones new_full new_empty rand randn", along.new)
    # along dims
    | packets("softmax _softmax log_softmax _log_softmax _safe_softmax", along.kept)
    | packets("cumsum cumprod logcumsumexp cummax cummin", along.kept)
    | packets("topk sort argsort flip roll diff glu", along.apart)
    | packets("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft", along.apart)
    | packets("slice narrow split split_with_sizes chunk cat concat concatenate msort", along.along_first)
    | packets("tril triu", along.last_two)
    | packets("layer_norm rms_norm native_layer_norm _fused_rms_norm", along.norm)
    | packets("sum nansum count_nonzero", along.total)
    | packets("mean nanmean amax amin max min argmax argmin aminmax logsumexp prod any all", along.mixed)
    | packets("median nanmedian kthvalue mode var std var_mean std_mean norm linalg_vector_norm", along.mixed)
    | packets("select unbind", along.selected)
    | packets("diagonal", along.diagonal)
    | packets("stack", along.stack)
    | packets("pad constant_pad_nd", along.padded)
    | packets("unfold", along.unfold)
    | packets("lstm gru rnn_tanh rnn_relu", along.recurrent)
    # views
    | packets("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as", moves.reshape)
    | packets("permute transpose t movedim moveaxis swapaxes swapdims numpy_T mT adjoint", moves.permute)
    | packets("repeat", moves.repeat)
    | packets("view_as_complex", text("... p^ -> ..."))
    | packets("view_as_real", text("... -> ... p^"))
    # indexing
    | packets("embedding", products.embedding)
    | packets("gather", moves.gather)
    | packets("index_select", moves.index_select)
    | packets("index", moves.index)
    | packets("scatter scatter_add scatter_reduce", moves.scatter)
    | packets("index_add index_copy", moves.index_add)
    | packets("index_put", moves.index_put)
    | packets("one_hot", text("... -> ... c^"))
    | {packet_of(CTC_LOSSES): text("t^ b c^, b s^, b, b -> b")}
    # images
    | packets("grid_sampler", text("n c h^ w^, n p q t^ -> n c p q", "n c d^ h^ w^, n o p q t^ -> n c o p q"))
    | packets("batch_norm native_batch_norm _native_batch_norm_legit", products.batch_norm)
    | packets("instance_norm", products.instance_norm)
    | packets("_native_batch_norm_legit_functional _native_batch_norm_legit_no_training", products.batch_norm)
    | packets("group_norm", products.group_norm)
    | packets("avg_pool1d max_pool1d adaptive_avg_pool1d adaptive_max_pool1d", POOLS[1])
    | packets("upsample_nearest1d upsample_linear1d", POOLS[1])
    | packets("avg_pool2d max_pool2d adaptive_avg_pool2d adaptive_max_pool2d", POOLS[2])
    | packets("_adaptive_avg_pool2d max_pool2d_with_indices upsample_nearest2d upsample_bilinear2d", POOLS[2])
    | packets("upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa", POOLS[2])
    | packets("avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d", POOLS[3])
    # losses
    | packets("cross_entropy_loss nll_loss_nd", along.loss_of_rows)
    | {getitem: item}
)
