"""The small graph by which a host checks an assumption: its batch inputs, and the question about them.

if not (ids < n).all(): raise …          the number of all(ids < n), of ids, is 1
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from passes.program.known_values import follows
from passes.program.ops.aten import aten, is_mutable, packet_of
from passes.program.program import Condition
from passes.program.walks import in_order
from planner.capture.functional import UnknownWrite, make_functional

MOST_ELEMENTS = 1 << 22  # of all values of one microbatch together
_TRUTH = sympy.Symbol("truth")
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
Truth = Callable[[fx.Graph, fx.Node], fx.Node]  # the call that makes one bool of a value


def is_read(node: fx.Node | None) -> bool:
    return node is not None and packet_of(node.target) in (aten.item, aten._local_scalar_dense)


def reads_of(makers: Mapping[Any, fx.Node | None]) -> list[fx.Node]:
    """Return the tensors from which numbers are read, of the calls that made these."""
    reads = [node.args[0] for node in makers.values() if node is not None and is_read(node)]
    return [n for n in reads if isinstance(n, fx.Node)]


def condition_of(question: Any, answer: bool, makers: Mapping[Any, fx.Node | None], tracer: Any) -> Condition | None:
    """Return the condition; None if it reads too much. ``makers``: of each symbol the call that read it."""
    nodes = reads_of(makers)
    order = in_order(nodes)
    if len(nodes) < len(makers) or not all(map(_is_plain, order)):
        return None
    return conditioned(Asked(question, answer, tuple(makers)), order, nodes, tracer.root)


def _is_plain(node: fx.Node) -> bool:
    """Return whether a call can be repeated later: it draws nothing, and no op writes into its inputs or results."""
    if node.op != "call_function":
        return not any(is_mutable(user.target) for user in node.users)
    is_op = follows(node) and hasattr(node.target, "_schema") and not is_mutable(node.target)
    return is_op and not any(is_mutable(user.target) for user in node.users)


def that(truth: Truth, of: fx.Node, order: Sequence[fx.Node], root: Any, **rest: Any) -> Condition | None:
    """Return the condition that ``truth`` of a value is true. ``order``: the calls that make it or write into it."""
    if not all(n.op != "call_function" or (follows(n) and hasattr(n.target, "_schema")) for n in order):
        return None
    return conditioned(Asked(sympy.Eq(_TRUTH, 1), True, (_TRUTH,), truth), order, [of], root, **rest)


class Asked(NamedTuple):
    """``symbols`` stand for the ``truth`` of the values that are read."""

    question: Any
    answer: bool
    symbols: tuple[Any, ...]
    truth: Truth = lambda _, node: node


def conditioned(
    asked: Asked,
    order: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    root: Any,
    *,
    most: int = MOST_ELEMENTS,
    constants: Mapping[str, Tensor] = _NOTHING,
) -> Condition | None:
    """Return the condition. ``constants``: values of placeholders, by name.

    None if ``order`` computes more than ``most`` elements, a number of elements that depends on data, or with a tensor
    without a value. Inputs are named by their position among the placeholders.
    """
    held = {n: constants[n.name] for n in order if n.op == "placeholder" and n.name in constants}
    attributes = {str(n.target): getattr(root, str(n.target)) for n in order if n.op == "get_attr"}
    attributes |= {n.name: value for n, value in held.items()}
    sizes = [n.meta["val"].numel() for n in order if isinstance(n.meta.get("val"), Tensor)]
    if any(isinstance(n, torch.SymInt) for n in sizes) or sum(sizes) > most:
        return None
    if any(isinstance(value, FakeTensor) or not isinstance(value, Tensor) for value in attributes.values()):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = list(order[0].graph.find_nodes(op="placeholder")) if order else []
    inputs = [n for n in placeholders if n in order and n not in held]
    for node in [*inputs, *(n for n in order if n not in inputs)]:
        copies[node] = graph.get_attr(node.name) if node in held else graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
        if node.target is aten._is_all_true.default:  # of torch._check; a plan file may not hold it
            copies[node].target = aten.all.default
    graph.output(tuple(asked.truth(graph, copies[n]) for n in reads))
    module = fx.GraphModule(attributes, graph)
    try:
        if any(is_mutable(n.target) for n in order) and make_functional(module):
            return None  # an input is written to
    except UnknownWrite:
        return None
    for node in module.graph.nodes:
        node.meta = {}
    places = tuple((str(placeholders.index(n) - len(placeholders)), n.meta["val"].dtype) for n in inputs)
    return Condition(module, places, asked.symbols, asked.question, asked.answer)
