"""Ops that are no more than a few other ops (tensordot, inner, hstack, mse_loss, weight_norm …), written out.

PyTorch itself defines such an op: by its composite kernel, or by its table of decompositions. It is written out if it
carries a gradient and has no rule of its own, and kept as one op (and reported) if its parts would have none either, or
would be very many (an LSTM, step by step: as few steps are kept too, so that a plan depends on no length).

Layers are written out in ops that have a rule, so that tp shards the features of the state. One step of a recurrent
layer, and bags of embeddings of one length (others, which data may give, stay one op):

    embedding_bag(W, ids [b·l], arange(0, b·l, l))                the sum, mean or maximum over l of W[ids [b, l]]

So are variances and deviations over the batch, of values without a gradient (advantages that are whitened): their sums
add up over microbatches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from passes.canonical.emit import table
from passes.errors import PlanError
from passes.program.ops.aten import aten, nodes_in, packet_of, shape_of
from passes.program.source_lines import where_of
from passes.rules.table import runs_in_steps

HasRule = Callable[[Any], bool]
MOST_CALLS = 64
_SMALL = float(torch.tensor(1e-12))  # what PyTorch adds to a squared norm
_SUM, _MEAN, _MAX = range(3)  # of a bag


def _loss_of_linear(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, of_classes: Tensor | None, *rest: Any
) -> Tensor:
    """``F.linear_cross_entropy`` in chunks of the batch, as ``F.linear_cross_entropy`` defines it without them."""
    reduction, ignore_index, smoothing = rest[:3] if isinstance(rest[0], str) else ("none", rest[0], 0.0)
    logits = functional.linear(x, weight, bias)
    return functional.cross_entropy(logits, target, of_classes, None, ignore_index, None, reduction, smoothing)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Σ_y Σ_i max(0, 1 − x_y + x_i) / classes of each row; y are its targets before the first −1, i all others."""
    rows, labels = (x, target) if x.dim() > 1 else (x.unsqueeze(0), target.unsqueeze(0))
    known = (labels < 0).cumsum(1) == 0
    own = (labels.unsqueeze(-1) == torch.arange(rows.shape[1], device=x.device)) & known.unsqueeze(-1)
    beyond = functional.relu(1 - rows.gather(1, labels.clamp(min=0)).unsqueeze(-1) + rows.unsqueeze(1))
    counted = known.unsqueeze(-1) & own.any(1, keepdim=True).logical_not()
    each = beyond.masked_fill(counted.logical_not(), 0.0).sum((1, 2)) / rows.shape[1]
    return _reduced(each, reduction, x.dim() > 1)


def _cosine_embedding(a: Tensor, b: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1) -> Tensor:
    """Return 1 − cos(a, b) of rows with target 1, max(0, cos(a, b) − margin) of those with −1."""
    norms = ((a * a).sum(-1) + _SMALL) * ((b * b).sum(-1) + _SMALL)
    cosine = (a * b).sum(-1) / norms.sqrt()
    apart = functional.relu(cosine - margin).masked_fill(target != -1, 0.0)
    return _reduced(torch.where(target == 1, 1 - cosine, apart), reduction, has_rows=True)


def _reduced(each: Tensor, reduction: int, has_rows: bool) -> Tensor:
    if reduction:
        return each.mean() if reduction == 1 else each.sum()
    return each if has_rows else each.squeeze(0)


# Ops that PyTorch makes of several and does not write out; some are of newer versions than the oldest that we run on.
_OURS: dict[str, Callable[..., Any]] = {
    # its other results are gradients, for its own backward
    "torch_nn._linear_cross_entropy_batch_chunked.default": lambda *given: (_loss_of_linear(*given), *given[:3]),
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": _loss_of_linear,
    "aten.cosine_embedding_loss.default": _cosine_embedding,
    "aten.multilabel_margin_loss.default": _multilabel_margin,
}


def written_out(node: fx.Node, args: Any, kwargs: Any, spellings: Any, has_rule: HasRule) -> fx.GraphModule | None:
    """Return the graph that defines the call ``node``, over its tensor arguments in order; None if it stays a call.

    ``spellings``: ops that canonical form rewrites, and which therefore need no rule.
    ``has_rule``: whether an op has a rule.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or has_rule(target) or runs_in_steps(target):
        return None
    if "batch_norm" in str(target):
        return None  # it is recognised by its name (passes.partition.loss.shares)
    ours = _OURS.get(str(target))
    whole = ours or (target.decompose if target._can_decompose() else decomposition_table.get(target))
    is_stack = target._opname.endswith("stack")  # joins tensors under another name; ids and masks are joined so too
    if whole is None or not (is_stack or any(n.meta["grad"] for n in nodes_in((args, kwargs)))):
        return None
    try:
        graph = traced(whole, args, kwargs, None if ours else _without_rule(spellings, has_rule))
    except Exception:
        return None  # an op that PyTorch cannot write out stays a call, and is reported
    calls = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    known = all(has_rule(op) or op in spellings or not _reads(op) for op in calls) and len(calls) <= MOST_CALLS
    return graph if known and not graph.graph.find_nodes(op="get_attr") else None


def _without_rule(spellings: Any, has_rule: HasRule) -> dict[Any, Any]:
    """Return the decompositions of an op's parts that have no rule, and need one."""
    unknown = {op: how for op, how in decomposition_table.items() if op not in spellings and not has_rule(op)}
    ops = [op for op in unknown if isinstance(op, torch._ops.OpOverload)]
    return {op: unknown[op] for op in ops if _reads(op)}


def _reads(op: Any) -> bool:
    """Return whether it has tensors as inputs: any other call needs no rule."""
    return not isinstance(op, torch._ops.OpOverload) or any("Tensor" in str(a.type) for a in op._schema.arguments)


def _sides(x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> list[Tensor]:
    """Return the gates of the input and of the state, [b, gates · h] each."""
    return [functional.linear(x, w_ih, b_ih), functional.linear(hidden, w_hh, b_hh)]


def _lstm_cell(x: Tensor, state: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    hidden, cell = state
    taken, kept, new, shown = torch.add(*_sides(x, hidden, *weights)).chunk(4, -1)
    cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
    return shown.sigmoid() * cell.tanh(), cell


def _gru_cell(x: Tensor, hidden: Tensor, *weights: Any) -> Tensor:
    of_x, of_hidden = (side.chunk(3, -1) for side in _sides(x, hidden, *weights))
    reset, kept = ((a + b).sigmoid() for a, b in zip(of_x[:2], of_hidden[:2], strict=True))
    new = (of_x[2] + reset * of_hidden[2]).tanh()
    return new + kept * (hidden - new)


def _plain_cell(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *given: act(torch.add(*_sides(*given)))


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    """Write out glu: each half is a segment of its own."""
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def _cosine(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return Σ of x/‖x‖ · y/‖y‖ along the dim; a norm is at least eps."""
    units = [x / torch.linalg.vector_norm(x, 2, [dim], True).clamp_min(eps) for x in (a, b)]
    return (units[0] * units[1]).sum([dim])


# Written out whether or not they carry a gradient.
SPELLED: dict[Any, Callable[..., Any]] = table(
    {
        _lstm_cell: "lstm_cell",
        _gru_cell: "gru_cell",
        _plain_cell(torch.tanh): "rnn_tanh_cell",
        _plain_cell(torch.relu): "rnn_relu_cell",
        _glu: "glu",
        _cosine: "cosine_similarity",
    }
)


def traced(whole: Callable[..., Any], args: Any, kwargs: Any, parts: dict[Any, Any] | None = None) -> fx.GraphModule:
    """Return the graph of a function, over the tensors among its arguments in order. ``parts``: the decompositions of
    its ops; None: it is as written."""
    inputs = list(dict.fromkeys(nodes_in((args, kwargs))))

    def run(*values: Tensor) -> Any:
        env = dict(zip(inputs, values, strict=True))
        given, options = fx.map_arg((args, kwargs), lambda n: env[n])
        return whole(*given, **options)

    values = [n.meta["val"].detach() for n in inputs]
    return make_fx(run, parts or {}, "real", pre_dispatch=parts is None)(*values)


Written = tuple[Callable[..., Any], tuple[Any, ...]] | None  # a function of tensors, and its arguments


def _embedding_bag(node: fx.Node, given: dict[str, Any]) -> Written:
    """Write out bags of one size, which begin at its multiples."""
    offsets, length = given["offsets"], shape_of(given["indices"])[0]
    bounds: Any = offsets.args if offsets.target is aten.arange.start_step else ()
    is_even = tuple(bounds[:2]) == (0, length) and len(bounds) == 3 and bounds[2] > 0 and length % bounds[2] == 0
    if not is_even or given["include_last_offset"]:
        return None
    if given["scale_grad_by_freq"]:
        raise frequency_scaled(node)
    names, size = ("weight", "indices", "per_sample_weights", "mode", "padding_idx"), int(bounds[2])
    return lambda *read: (_of_bags(size, *read), None, None, None), tuple(given.get(name) for name in names)


def _of_bags(
    size: int, weight: Tensor, indices: Tensor, scales: Tensor | None, mode: int, padding_idx: int | None
) -> Tensor:
    """Reduce ids [b · l] to bags [b, h]; a bag in which no row is kept is 0."""
    ids = indices.view(-1, size)
    rows = functional.embedding(ids, weight)
    rows = rows if scales is None else rows * scales.view(-1, size, 1)
    if padding_idx is None or padding_idx < 0:
        return rows.amax(1) if mode == _MAX else rows.mean(1) if mode == _MEAN else rows.sum(1)
    kept = (ids != padding_idx).unsqueeze(-1)
    dropped = kept.logical_not()
    if mode == _MAX:
        return rows.masked_fill(dropped, -math.inf).amax(1).masked_fill(dropped.all(1), 0.0)
    total = rows.masked_fill(dropped, 0.0).sum(1)
    return total if mode == _SUM else total / kept.sum(1).clamp(1)


def frequency_scaled(node: fx.Node) -> PlanError:
    return PlanError(
        "scale_grad_by_freq divides the gradient of an embedding by counts in the batch, which a microbatch does not "
        "have",
        where=where_of(node),
        fix="remove scale_grad_by_freq",
    )


def _variance(node: fx.Node, given: dict[str, Any]) -> Written:
    x, value = given["self"], given["self"].meta["val"]
    dims = sorted({d % max(1, value.dim()) for d in given.get("dim") or range(value.dim())})
    if x.meta["grad"] or 0 not in dims or not value.dim() or value.is_complex():
        return None
    correction, name = given.get("correction", given.get("unbiased")), packet_of(node.target).__name__
    size = math.prod(value.shape[d] for d in dims) - (1 if correction is None else correction)
    shape = [1 if d in dims else n for d, n in enumerate(value.shape) if given.get("keepdim") or d not in dims]

    def written(x: Tensor) -> Any:
        """Return Σ (x − mean)² / size along the dims, or its root; of half precision in float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(dims, True)
        apart = wide - mean
        spread = (apart * apart).sum(dims, True) / size
        found = [n.reshape(shape).to(x.dtype) for n in (spread.sqrt() if "std" in name else spread, mean)]
        return tuple(found) if name.endswith("mean") else found[0]

    return written, (x,)


# They are written out, or stay calls, by their arguments.
LAYERS: dict[Any, Callable[[fx.Node, dict[str, Any]], Written]] = table(
    {
        _variance: "std.default std.dim std.correction var.default var.dim var.correction "
        "std_mean.default std_mean.dim std_mean.correction var_mean.default var_mean.dim var_mean.correction",
        _embedding_bag: "embedding_bag.padding_idx embedding_bag",
    }
)
