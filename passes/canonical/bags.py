"""Sums, means and maxima of equally long bags of embeddings (``EmbeddingBag``) in ops that have a rule.

    embedding_bag(W, ids [b·l], arange(0, b·l, l))    → the mean over l of embedding(W, ids [b, l])

Bags of other lengths, which data may give, stay one op.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonical.emit import Emit, Rewrite, applied, table, viewed
from passes.errors import PlanError
from passes.program.ops.aten import aten, named, shape_of
from passes.program.source_lines import where_of

_SUM, _MEAN, _MAX = 0, 1, 2


def _embedding_bag(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = named(node, args, kwargs)
    size = _bag_size(given["offsets"], shape_of(given["indices"])[0])
    if size is None or given["include_last_offset"]:
        return emit(node.target, args, kwargs, node.meta["val"])
    if given["scale_grad_by_freq"]:
        raise frequency_scaled(node)
    ids = _in_bags(emit, given["indices"], size)
    rows, kept = applied(emit, aten.embedding.default, given["weight"], ids), None
    if given.get("padding_idx") is not None and given["padding_idx"] >= 0:
        kept = applied(emit, aten.unsqueeze.default, applied(emit, aten.ne.Scalar, ids, given["padding_idx"]), -1)
    if given["per_sample_weights"] is not None:
        weights = _in_bags(emit, given["per_sample_weights"], size)
        rows = applied(emit, aten.mul.Tensor, rows, viewed(emit, weights, [*shape_of(weights), 1]))
    return _reduced(emit, rows, kept, given["mode"]), None, None, None


def frequency_scaled(node: fx.Node) -> PlanError:
    return PlanError(
        "scale_grad_by_freq divides the gradient of an embedding by counts in the batch, which a microbatch does not "
        "have",
        where=where_of(node),
        fix="remove scale_grad_by_freq",
    )


def _bag_size(offsets: fx.Node, length: int) -> int | None:
    """The length of all bags, if they begin at multiples of it."""
    bounds: Any = offsets.args if offsets.target is aten.arange.start_step else ()
    begins = tuple(bounds[:2]) == (0, length) and len(bounds) == 3 and bounds[2] > 0 and length % bounds[2] == 0
    return int(bounds[2]) if begins else None


def _in_bags(emit: Emit, x: fx.Node, size: int) -> fx.Node:
    shape = [shape_of(x)[0] // size, size]
    seen = x.all_input_nodes[0] if x.target is aten.reshape.default else x
    return seen if shape_of(seen) == tuple(shape) else viewed(emit, x, shape)


def _reduced(emit: Emit, rows: fx.Node, kept: fx.Node | None, mode: int) -> fx.Node:
    """[b, l, h] → [b, h]; of a bag without a row that is kept 0."""
    if kept is None and mode == _MAX:
        return applied(emit, aten.amax.default, rows, [1])
    if kept is None:
        return applied(emit, aten.mean.dim if mode == _MEAN else aten.sum.dim_IntList, rows, [1])
    dropped = applied(emit, aten.logical_not.default, kept)
    if mode == _MAX:
        most = applied(
            emit, aten.amax.default, applied(emit, aten.masked_fill.Scalar, rows, dropped, -float("inf")), [1]
        )
        return applied(emit, aten.masked_fill.Scalar, most, applied(emit, aten.all.dim, dropped, 1), 0.0)
    total = applied(emit, aten.sum.dim_IntList, applied(emit, aten.masked_fill.Scalar, rows, dropped, 0.0), [1])
    if mode == _SUM:
        return total
    count = applied(emit, aten.sum.dim_IntList, kept, [1])
    return applied(emit, aten.div.Tensor, total, applied(emit, aten.clamp.default, count, 1))


BAGS: dict[Any, Rewrite] = table({_embedding_bag: "embedding_bag.padding_idx embedding_bag"})
