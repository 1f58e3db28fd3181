"""Sums over tokens in float32, if a model computes in half precision.

    cross_entropy(x, t, sum)      → cross_entropy(x, t, none).to(float32).sum()
    x.sum(), x.mean()             → x.sum(dtype=float32), x.mean(dtype=float32)
    count.to(half)                → count.to(float32);  float32.to(half) → float32
    scalars made of these         → the same ops, in float32

One process divides by its own count inside one op, in float32. Shares of the loss are sums, and the count is of the
global batch: float16 ends at 65,504, and bfloat16 takes 1,000,003 tokens for 999,424.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from passes.partition.loss.loss_ops import MEAN, SUM, reduction_of, unreduced
from passes.program.ops.aten import aten, is_pointwise, packet_of
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.walks import operands, walk

HALF = (torch.float16, torch.bfloat16)
WIDE = torch.float32


def widen(graph: fx.Graph, ends: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Compute the half-precision scalars that lead to ``ends`` in float32; node → its replacement. Readers that need
    the old dtype get a cast. The old nodes stay, unread.
    """
    wide: dict[fx.Node, fx.Node] = {}
    leading = set(walk(ends, operands, into=_is_scalar))
    for node in [n for n in graph.nodes if n in leading and n.op == "call_function" and n.meta["val"].dtype in HALF]:
        with graph.inserting_after(node):
            new = _in_float32(graph, node, wide)
        if new is not None:
            wide[node] = new
    for old, new in wide.items():
        readers = [reader for reader in old.users if reader not in wide and reader is not new]
        if readers:
            with graph.inserting_after(new):
                cast = _call(graph, old, aten.to.dtype, (new, old.meta["val"].dtype), old.meta["val"])
            for reader in readers:
                reader.replace_input_with(old, cast)
    return wide


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _in_float32(graph: fx.Graph, node: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node | None:
    if reduction_of(node):
        return _unreduced(graph, node)
    if packet_of(node.target) in (aten.sum, aten.mean):
        return _scalar(graph, node, node.target, node.args, {**node.kwargs, "dtype": WIDE})
    if node.target is aten.to.dtype:
        source: Any = node.args[0]
        if source in wide or source.meta["val"].dtype == WIDE:
            return wide.get(source, source)
        return _scalar(graph, node, aten.to.dtype, (source, WIDE)) if source.op == "placeholder" else None
    if is_pointwise(node.target) and any(n in wide for n in node.all_input_nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: wide.get(n, n))  # pyright: ignore
        return _scalar(graph, node, node.target, args, kwargs)
    return None


def _unreduced(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The loss of each row, then their sum or mean in float32; None for a mean over rows that do not all count."""
    reduction = reduction_of(node)
    if reduction == MEAN and node.target in CROSS_ENTROPIES:
        return None
    args, kwargs, shape = unreduced(node)
    value = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    each = _call(graph, node, node.target, tuple(args), value, kwargs)
    with graph.inserting_after(each):
        op = aten.sum.default if reduction == SUM else aten.mean.default
        return _scalar(graph, node, op, (each,), {"dtype": WIDE})


def _scalar(
    graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    return _call(graph, like, target, args, torch.empty((), dtype=WIDE, device="meta"), kwargs)


def _call(
    graph: fx.Graph,
    like: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    value: torch.Tensor,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    new = graph.call_function(target, args, kwargs or {})
    new.meta = {**like.meta, "val": value}
    return new
