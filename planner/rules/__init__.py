"""The rule table: one small file a family of ops, one visible table from op to rule."""

from __future__ import annotations

import operator
from typing import Any

import torch

from planner.rules.attention import attention
from planner.rules.base import Option, Rule, Site
from planner.rules.contraction import contraction
from planner.rules.embedding import embedding
from planner.rules.layout import cat, expand, getitem, permute, reshape, select_rows, slice_, split
from planner.rules.loss import cross_entropy
from planner.rules.pointwise import is_pointwise, pointwise
from planner.rules.reduction import along_dim, norm, reduction

__all__ = ["Option", "Site", "options_of", "rule_of"]


def _ops(rule: Rule, names: str) -> dict[Any, Rule]:
    aten = torch.ops.aten
    found = (getattr(getattr(aten, n.partition(".")[0], None), n.partition(".")[2] or "default", None)
             for n in names.split())
    return {op: rule for op in found if op is not None}


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
    **_ops(reduction, "sum sum.dim_IntList mean mean.dim amax amin var.correction var.dim std.correction std.dim "
                      "logsumexp prod.dim_int any.dim any.dims all.dim argmax argmin max min norm.ScalarOpt_dim "
                      "linalg_vector_norm"),
    **_ops(along_dim, "softmax.int log_softmax.int _softmax _log_softmax cumsum sort sort.stable topk max.dim min.dim "
                      "flip cumprod argsort roll diff"),
}


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; None where there is none (it is then computed whole on every rank, and reported)."""
    if target in RULES:
        return RULES[target]
    return pointwise if is_pointwise(target) else None


def options_of(site: Site) -> list[Option]:
    """Every admissible typing of a node, the whole ones first; in a fixed order, none twice."""
    options = dict.fromkeys(site.uniform())
    rule = rule_of(site.node.target)
    if rule is not None and site.inputs and site.tp > 1:
        options |= dict.fromkeys(o for o in rule(site) if site.grad(site.node) or o.rule != "partial")
    return list(options)
