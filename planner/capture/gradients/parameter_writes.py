"""Refuse a forward that writes into a parameter: the engine's weights change by the optimizer's update alone.

    nn.Embedding(max_norm=…)            renormalises rows of its weight
    with torch.no_grad(): w.mul_(0.9)   also through views, w.data and w.detach()

Read off the exported graph before it is made functional, while writes are still visible.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from passes.errors import PlanError
from passes.program.source_lines import where_of

FIX = "compute a new value in the forward (`w = self.weight * c`), or change the weight outside the forward"
MAX_NORM_FIX = "remove max_norm, and divide by the norm in the forward: `F.embedding(ids, normalised(self.weight))`"


def drop_writes_of_itself(module: fx.GraphModule) -> None:
    """Erase ``x.set_(x)``, by which ``nn.utils.parametrize`` registers a parametrization within the forward.

    Where a region without gradients does so, the value behind it is ``x`` itself, with its gradient.
    """
    graphs = [inner for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    for inner in graphs:
        for node in inner.graph.find_nodes(op="call_function", target=torch.ops.aten.set_.source_Tensor):
            value, source = node.args
            if value is source:
                node.replace_all_uses_with(source)
                inner.graph.erase_node(node)
    for inner in graphs:
        for node in inner.graph.find_nodes(op="call_function", target=operator.getitem):
            if (same := _passed_through(inner, node)) is not None:
                node.replace_all_uses_with(same)


def _passed_through(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The operand of a region that ``node``, one of its results, is; None for a result that the region makes."""
    call: Any = node.args[0]
    for body, holders, operands in _bodies(module, call) if isinstance(call, fx.Node) else ():
        results: Any = body.graph.output_node().args[0]
        result = results[node.args[1]] if isinstance(results, (tuple, list)) else None  # pyright: ignore
        if result in holders:
            return operands[holders.index(result)]
    return None


def refuse_parameter_writes(module: fx.GraphModule, parameters: Mapping[str, str]) -> None:
    """``parameters``: placeholder name → dotted name. Raises PlanError at the first write, with the user's line."""
    names = {node: parameters[node.name] for node in module.graph.nodes if node.name in parameters}
    for node, fqn in _writes(module, names):
        renormalises = "embedding_renorm" in str(node.target)
        how = " (max_norm rescales its rows)" if renormalises else ""
        raise PlanError(
            f"the forward writes into parameter {fqn}{how}: the update would be lost",
            where=where_of(node),
            fix=MAX_NORM_FIX if renormalises else FIX,
        )


def _writes(module: fx.GraphModule, names: Mapping[fx.Node, str]) -> Iterator[tuple[fx.Node, str]]:
    """(node that writes, the parameter's name), also in regions without gradients."""
    of: dict[Any, str] = dict(names)
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            yield from _writes_in_region(module, node, of)
        elif isinstance(node.target, torch._ops.OpOverload):
            for argument, value in _arguments(node):
                if argument.alias_info is None or value not in of:
                    continue
                if argument.alias_info.is_write and node.target is not torch.ops.aten.detach_.default:
                    yield node, of[value]
                of[node] = of[value]


def _writes_in_region(module: fx.GraphModule, node: fx.Node, of: Mapping[Any, str]) -> Iterator[tuple[fx.Node, str]]:
    for body, holders, operands in _bodies(module, node):
        yield from _writes(body, {h: of[o] for h, o in zip(holders, operands, strict=False) if o in of})


def _bodies(module: fx.GraphModule, node: fx.Node) -> Iterator[tuple[fx.GraphModule, list[fx.Node], list[Any]]]:
    """The graphs that a call of a region runs, each with its placeholders and what they stand for."""
    for body in [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]:
        inner: Any = getattr(module, str(body.target), None)
        if isinstance(inner, fx.GraphModule):
            yield inner, list(inner.graph.find_nodes(op="placeholder")), [*node.args[node.args.index(body) + 1 :]]


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """(schema argument, value) for the tensors given to an op."""
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node):
            yield argument, value
