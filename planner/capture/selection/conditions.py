"""The small graph by which a host checks an assumption: its batch inputs, and the question about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from passes.program.assumptions import Condition
from passes.program.constants import follows
from passes.program.ops.aten import aten, is_mutable, packet_of
from passes.program.walks import in_order

MOST_ELEMENTS = 1 << 22  # of all values of one microbatch together


def is_read(node: fx.Node | None) -> bool:
    """Whether a call reads a number out of a tensor."""
    return node is not None and packet_of(node.target) in (aten.item, aten._local_scalar_dense)


def condition_of(question: Any, answer: bool, makers: Mapping[Any, fx.Node | None], tracer: Any) -> Condition | None:
    """``makers``: of each symbol the call that read it. None if it reads more than the batch, or much.

    Inputs are named by their position among the placeholders.
    """
    reads = [node.args[0] for node in makers.values() if node is not None and is_read(node)]
    if len(reads) < len(makers) or not all(isinstance(n, fx.Node) for n in reads):
        return None
    order = in_order([n for n in reads if isinstance(n, fx.Node)])
    attributes = {str(n.target): getattr(tracer.root, str(n.target)) for n in order if n.op == "get_attr"}
    sizes = [n.meta["val"].numel() for n in order if isinstance(n.meta.get("val"), torch.Tensor)]
    if any(isinstance(n, torch.SymInt) for n in sizes) or sum(sizes) > MOST_ELEMENTS:  # as many as data selects
        return None
    if not all(_is_plain(n) for n in order):
        return None
    if any(isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor) for value in attributes.values()):
        return None
    return _made(question, answer, tuple(makers), order, reads, attributes)


def _is_plain(node: fx.Node) -> bool:
    """Whether a call can be made again later: it draws nothing, and no op writes into its inputs or results."""
    if node.op != "call_function":
        return not any(is_mutable(user.target) for user in node.users)
    is_op = follows(node) and hasattr(node.target, "_schema") and not is_mutable(node.target)
    return is_op and not any(is_mutable(user.target) for user in node.users)


def _made(question: Any, answer: bool, symbols: Any, order: Any, reads: Any, attributes: Any) -> Condition:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = list(order[0].graph.find_nodes(op="placeholder")) if order else []
    inputs = [n for n in placeholders if n in order]
    for node in [*inputs, *(n for n in order if n.op != "placeholder")]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(tuple(copies[n] for n in reads))
    places = tuple((str(placeholders.index(n) - len(placeholders)), n.meta["val"].dtype) for n in inputs)
    return Condition(fx.GraphModule(attributes, graph), places, symbols, question, answer)
