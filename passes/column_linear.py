"""f or a gather and the linears that read it become one op, which exchanges while it computes the weights' gradients.

    f(x), linear(f, W), linear(f, V)   →   column_linears(x, [W, V])
    f(x), addmm(b, f, W)               →   column_linears(x, [W], [b])
    gather(x), linear(gather, W)       →   gathered_linears(x, [W])     where the plan says so, not keeping the whole

Needs:   biases given back to their products.
Leaves:  no f or gather that is read by linears of parameters alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.cut_regions import owners, region_of
from passes.ops.collectives import f, gather
from passes.ops.column_linear import column_linears, gathered_linears
from passes.program.ops.groups import WITH_WEIGHT

aten = torch.ops.aten


def overlap_f(stage: StageGraph, context: LowerContext) -> None:
    """Only if no other op reads f: its gradient then comes from these products alone."""
    owner = owners(stage, context)
    for node in [n for n in stage.graph.nodes if n.op == "call_function" and n.target in (f, gather)]:
        readers = list(node.users)
        if len({id(region_of(place, owner)) for place in (node, *readers)}) > 1:
            continue  # one op cannot be in two regions
        parts = [_held(reader, node) for reader in readers]
        if not readers or None in parts or len({reader.target is aten.linear.default for reader in readers}) > 1:
            continue
        weights, biases = zip(*parts, strict=True)  # pyright: ignore
        transposed = readers[0].target is not aten.linear.default
        with stage.graph.inserting_before(node):
            products = (transposed, list(weights), list(biases))
            if node.target is f:
                fused = stage.graph.call_function(column_linears, (*node.args, *products))
            else:
                again = _gathers_again(node, weights, context)
                fused = stage.graph.call_function(gathered_linears, (*node.args, again, *products))
            fused.meta = {**node.meta, "val": tuple(reader.meta["val"] for reader in readers)}
            for position, reader in enumerate(readers):
                result = stage.graph.call_function(operator.getitem, (fused, position))
                result.meta = dict(reader.meta)
                reader.replace_all_uses_with(result)
        for done in (*readers, node):
            stage.graph.erase_node(done)


def _gathers_again(node: fx.Node, weights: Sequence[fx.Node], context: LowerContext) -> bool:
    """Whether the gathered value is not saved: only the gradients of weights need it."""
    trains = any(weight.meta.get("grad") for weight in weights)
    return context.lowering.options.regather and node.meta["change"].axis == "tp" and trains


def operands(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """(value, weight, bias or None) of a product of two matrices; None for anything else."""
    if node.op != "call_function" or node.target not in WITH_WEIGHT or node.kwargs:
        return None
    args: Any = node.args
    bias, value, weight = args if node.target is aten.addmm.default else (*(args[2:] or (None,)), *args[:2])
    return value, weight, bias


def _held(reader: fx.Node, x: fx.Node) -> tuple[Any, Any] | None:
    """(weight, bias) of a product of ``x`` with a parameter; None for anything else."""
    value, weight, bias = operands(reader) or (None, None, None)
    held = [n for n in (weight, bias) if n is not None]
    is_product = value is x and all(isinstance(n, fx.Node) and n.op == "get_attr" for n in held)
    return (weight, bias) if is_product else None
