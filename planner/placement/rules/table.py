"""The rule table: one small file a family of ops, one visible table from op to rule."""

from __future__ import annotations

import operator
from typing import Any

from planner.graph.ops.aten import is_pointwise, ops_named
from planner.graph.ops.own_backward import OwnBackward
from planner.placement.rules.attention import attention
from planner.placement.rules.base import Option, Rule, Site
from planner.placement.rules.contraction import contraction, grouped
from planner.placement.rules.convolution import batch_norm, convolution, group_norm, spatial
from planner.placement.rules.embedding import embedding
from planner.placement.rules.forms import Form
from planner.placement.rules.indexing import (
    complex_view,
    gather,
    index,
    index_add,
    index_put,
    linear_along_dim,
    one_hot,
    pad,
    scatter,
    triangle,
    unfold,
)
from planner.placement.rules.layout import cat, expand, getitem, permute, reshape, select_rows, slice_, split
from planner.placement.rules.loss import cross_entropy
from planner.placement.rules.own_backward import own_backward
from planner.placement.rules.pointwise import pointwise
from planner.placement.rules.reduction import along_dim, logsumexp, mean, norm, reduction, softmax, total

__all__ = ["Option", "Site", "has_rule", "options_of", "rule_of"]


def _ops(rule: Rule, names: str) -> dict[Any, Rule]:
    return dict.fromkeys(ops_named(names), rule)


RULES: dict[Any, Rule] = {
    operator.getitem: getitem,
    **_ops(contraction, "linear mm bmm matmul einsum"),
    **_ops(embedding, "embedding"),
    **_ops(attention, "scaled_dot_product_attention"),
    **_ops(cross_entropy, "cross_entropy_loss"),
    **_ops(norm, "layer_norm rms_norm"),
    **_ops(reshape, "reshape"),
    **_ops(permute, "permute"),
    **_ops(expand, "expand"),
    **_ops(split, "split_with_sizes"),
    **_ops(slice_, "slice.Tensor"),
    **_ops(cat, "cat"),
    **_ops(select_rows, "index_select"),
    **_ops(
        reduction,
        "amax amin var var.dim var.correction std std.dim "
        "std.correction var_mean.dim var_mean.correction std_mean.dim std_mean.correction nansum nanmean "
        "prod prod.dim_int any any.dim any.dims all all.dim all.dims argmax argmin max min "
        "max.dim min.dim median.dim aminmax count_nonzero.dim_IntList norm.Scalar norm.ScalarOpt_dim "
        "linalg_vector_norm",
    ),
    **_ops(total, "sum sum.dim_IntList"),
    **_ops(mean, "mean mean.dim"),
    **_ops(logsumexp, "logsumexp"),
    **_ops(softmax, "softmax.int log_softmax.int"),
    **_ops(
        along_dim,
        "_softmax _log_softmax sort sort.stable topk cumprod argsort cummax cummin logcumsumexp _safe_softmax",
    ),
    **_ops(linear_along_dim, "cumsum flip roll diff"),
    **_ops(index, "index.Tensor"),
    **_ops(gather, "gather"),
    **_ops(scatter, "scatter.src scatter.value scatter_add scatter_reduce.two"),
    **_ops(index_add, "index_add index_copy"),
    **_ops(index_put, "index_put"),
    **_ops(pad, "pad constant_pad_nd"),
    **_ops(triangle, "tril triu"),
    **_ops(unfold, "unfold"),
    **_ops(one_hot, "one_hot"),
    **_ops(complex_view, "view_as_complex view_as_real"),
    **_ops(convolution, "conv1d conv2d conv3d convolution conv1d.padding conv2d.padding conv3d.padding"),
    **_ops(group_norm, "group_norm"),
    **_ops(
        batch_norm,
        "batch_norm instance_norm native_batch_norm _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats",
    ),
    **_ops(
        spatial,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d max_pool2d_with_indices "
        "upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec "
        "upsample_linear1d upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec "
        "upsample_bicubic2d upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec",
    ),
    **_ops(grouped, "_grouped_mm"),
}


# What a rule may give beside WHOLE and PARTIAL, which any op may be; nothing else is accepted of it.
GIVES: dict[Rule, frozenset[Form]] = {
    contraction: frozenset({Form.COLUMN, Form.ROW}),
    grouped: frozenset({Form.COLUMN, Form.ROW}),
    convolution: frozenset({Form.COLUMN, Form.ROW, Form.GROUPS}),
    group_norm: frozenset({Form.PARTS, Form.GROUPS}),
    embedding: frozenset({Form.PARTS, Form.VOCABULARY}),
    attention: frozenset({Form.PARTS, Form.SHARED_KEYS}),
    cross_entropy: frozenset({Form.CLASSES}),
    norm: frozenset({Form.PARTS, Form.OVER_RANKS}),
    softmax: frozenset({Form.PARTS, Form.OVER_RANKS}),
    logsumexp: frozenset({Form.PARTS, Form.OVER_RANKS}),
    total: frozenset({Form.PARTS, Form.SUM}),
    mean: frozenset({Form.PARTS, Form.MEAN}),
    gather: frozenset({Form.PARTS, Form.PICKED}),
    reshape: frozenset({Form.SIZES}),
    expand: frozenset({Form.SIZES}),
    split: frozenset({Form.SPLIT}),
    slice_: frozenset({Form.PARTS, Form.SEGMENT, Form.STRIDED}),
}
ANY_OP = frozenset({Form.WHOLE, Form.PARTIAL})


def forms_of(rule: Rule) -> frozenset[Form]:
    """All forms that a rule may give."""
    return ANY_OP | GIVES.get(rule, frozenset({Form.PARTS}))


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; None where there is none (it is then computed whole on every rank, and reported)."""
    if target in RULES:
        return RULES[target]
    if isinstance(target, OwnBackward):
        return own_backward if target.facts.cuts else None
    if "grouped_mm" in str(target):
        return grouped  # what transformers calls where the kernel is missing
    return pointwise if is_pointwise(target) else None


def has_rule(target: Any) -> bool:
    return rule_of(target) is not None


def options_of(site: Site) -> list[Option]:
    """Every admissible typing of a node, the whole ones first; in a fixed order, none twice."""
    options = dict.fromkeys(site.uniform())
    rule = rule_of(site.node.target)
    if rule is not None and site.inputs and site.tp > 1:
        found = [o for o in rule(site) if site.grad(site.node) or o.form is not Form.PARTIAL]
        assert all(o.form in forms_of(rule) for o in found), f"{rule} gave a form that GIVES does not list"
        options |= dict.fromkeys(found)
    return list(options)
