"""Ops that are no more than a few other ops (tensordot, inner, hstack, mse_loss, weight_norm …), written out.

PyTorch itself defines such an op: by its composite kernel, or by its table of decompositions. It is written out if it
carries a gradient and has no rule of its own, and kept as one op (and reported) if its parts would have none either, or
would be very many (an LSTM, step by step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

HasRule = Callable[[Any], bool]
MOST_CALLS = 64


def _loss_of_linear(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, of_classes: Tensor | None, *rest: Any
) -> Tensor:
    """``F.linear_cross_entropy`` in chunks of the batch, as ``F.linear_cross_entropy`` defines it without them."""
    reduction, ignore_index, smoothing = rest[:3] if isinstance(rest[0], str) else ("none", rest[0], 0.0)
    logits = functional.linear(x, weight, bias)
    return functional.cross_entropy(logits, target, of_classes, None, ignore_index, None, reduction, smoothing)


def _multi_margin(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Σ_i≠y max(0, margin − x_y + x_i)^p / classes of each row."""
    rows, own = (x, target.unsqueeze(-1)) if x.dim() > 1 else (x.unsqueeze(0), target.reshape(1, 1))
    beyond = functional.relu(margin - rows.gather(1, own) + rows) ** p
    if weight is not None:
        beyond = beyond * weight[own]
    each = beyond.masked_fill(torch.arange(rows.shape[1], device=x.device) == own, 0.0).mean(1)
    return _reduced(each, reduction, x.dim() > 1)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Σ_y Σ_i max(0, 1 − x_y + x_i) / classes of each row; y are its targets before the first −1, i all others."""
    rows, labels = (x, target) if x.dim() > 1 else (x.unsqueeze(0), target.unsqueeze(0))
    known = (labels < 0).cumsum(1) == 0
    own = (labels.unsqueeze(-1) == torch.arange(rows.shape[1], device=x.device)) & known.unsqueeze(-1)
    beyond = functional.relu(1 - rows.gather(1, labels.clamp(min=0)).unsqueeze(-1) + rows.unsqueeze(1))
    counted = known.unsqueeze(-1) & own.any(1, keepdim=True).logical_not()
    each = beyond.masked_fill(counted.logical_not(), 0.0).sum((1, 2)) / rows.shape[1]
    return _reduced(each, reduction, x.dim() > 1)


def _reduced(each: Tensor, reduction: int, has_rows: bool) -> Tensor:
    if reduction:
        return each.mean() if reduction == 1 else each.sum()
    return each if has_rows else each.squeeze(0)


# Ops that PyTorch makes of several and does not write out; some are of newer versions than the oldest that we run on.
_OURS: dict[str, Callable[..., Any]] = {
    "torch_nn._linear_cross_entropy_batch_chunked.default": lambda *given: (
        _loss_of_linear(*given),
        *given[:3],
    ),  # the others are gradients, for its own backward
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": _loss_of_linear,
    "aten.multi_margin_loss.default": _multi_margin,
    "aten.multilabel_margin_loss.default": _multilabel_margin,
}


def written_out(node: fx.Node, args: Any, kwargs: Any, spellings: Any, has_rule: HasRule) -> fx.GraphModule | None:
    """The graph that defines the call ``node``, over its tensor arguments in order; None if it stays a call.

    ``spellings``: ops that canonical form rewrites, and which therefore need no rule.
    ``has_rule``: whether an op has a rule.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or has_rule(target) or "batch_norm" in str(target):
        return None  # batch norm is recognised by its name (passes.partition.loss.shares)
    ours = _OURS.get(str(target))
    whole = ours or (target.decompose if target._can_decompose() else decomposition_table.get(target))
    inputs = list(dict.fromkeys(n for n in _nodes((args, kwargs))))
    if whole is None or not any(n.meta["grad"] for n in inputs):
        return None

    def run(*values: torch.Tensor) -> Any:
        env = dict(zip(inputs, values, strict=True))
        given, named = fx.map_arg((args, kwargs), lambda n: env[n])
        return whole(*given, **named)

    parts = _without_rule(spellings, has_rule)
    try:
        graph = make_fx(run, {} if ours else parts, "real", pre_dispatch=ours is not None)(
            *(n.meta["val"].detach() for n in inputs)
        )
    except Exception:
        return None  # an op that PyTorch cannot write out stays a call, and is reported
    calls = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    known = all(has_rule(op) or op in spellings for op in calls) and len(calls) <= MOST_CALLS
    return graph if known and not graph.graph.find_nodes(op="get_attr") else None


def _without_rule(spellings: Any, has_rule: HasRule) -> dict[Any, Any]:
    """The decompositions of an op's parts that have no rule; a call without tensor inputs needs none."""
    unknown = {op: how for op, how in decomposition_table.items() if op not in spellings and not has_rule(op)}
    return {op: how for op, how in unknown.items() if _reads_tensors(op)}


def _reads_tensors(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and any("Tensor" in str(a.type) for a in op._schema.arguments)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found
