"""A mean cross-entropy of a microbatch as its share of the mean over all valid labels of the global batch.

    cross_entropy(x, y, mean)   →   cross_entropy(x, y, sum) / Σ over the global batch of (y ≠ ignore_index)

With class weights the divisor is the sum of the weights of the valid labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.partition.loss.counts import Counts, input_only
from passes.partition.loss.loss_ops import SUM, counts_inputs
from passes.program.ops.aten import arguments, aten
from passes.program.program import Program

NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
NO_LABEL = -100  # PyTorch's default
Emit = Callable[[fx.Node, Any, list[Any]], fx.Node]  # a call with the meta values of another node


def counts_labels(node: fx.Node, program: Program) -> bool:
    """Whether the number of valid labels of a cross-entropy follows from the batch alone."""
    return not arguments(node)["target"].meta["val"].is_floating_point() and counts_inputs(node, input_only(program))


def over_all_labels(node: fx.Node, counts: Counts, emit: Emit) -> fx.Node:
    """The share of a mean cross-entropy that counts its labels. ``counts``: of the global batch."""
    given = arguments(node)
    target, weight = given["target"], given.get("weight")
    count = _valid_labels(target, weight, int(given.get("ignore_index", NO_LABEL)), emit)
    order = [given["self"], target, weight, SUM, *[given[name] for name in NAMES[4:] if name in given]]
    if "label_smoothing" in given and "ignore_index" not in given:
        order.insert(4, NO_LABEL)
    total = emit(node, node.target, order)
    return emit(node, aten.div.Tensor, [total, _denominator(count, node, counts, emit)])


def _denominator(count: fx.Node, like: fx.Node, counts: Counts, emit: Emit) -> fx.Node:
    """Σ ``count`` over the global batch, in the dtype of ``like``."""
    dtype = like.meta["val"].dtype
    new = emit(like, aten.to.dtype, [counts.holder(count), dtype])
    new.meta["val"], new.meta["grad"] = torch.empty((), dtype=dtype, device="meta"), False
    return new


def _valid_labels(target: fx.Node, weight: fx.Node | None, ignore_index: int, emit: Emit) -> fx.Node:
    """Σ (target ≠ ignore_index), or the sum of the class weights of the valid labels."""
    shape = target.meta["val"].shape

    def call(op: Any, args: list[Any], shape: torch.Size, dtype: torch.dtype) -> fx.Node:
        new = emit(target, op, args)
        new.meta["val"], new.meta["grad"] = torch.empty(shape, dtype=dtype, device="meta"), False
        return new

    valid = call(aten.ne.Scalar, [target, ignore_index], shape, torch.bool)
    if weight is None:
        return call(aten.sum.default, [valid], torch.Size(), torch.int64)
    dtype = weight.meta["val"].dtype
    safe = call(aten.mul.Tensor, [target, valid], shape, torch.int64)
    each = call(aten.index.Tensor, [weight, [safe]], shape, dtype)
    return call(aten.sum.default, [call(aten.mul.Tensor, [each, valid], shape, dtype)], torch.Size(), dtype)
