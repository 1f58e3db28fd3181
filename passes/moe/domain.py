"""Marks of values in the experts' domain, in ``node.meta["domain"]``: which axis types them, which dims are cut.

A ``Builder`` makes the calls with such marks in a captured graph: their place, their values, and their source line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from passes.types.types import Sizes

COPIED = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True, slots=True)
class Domain:
    """``experts``: the dim that counts the experts, sharded over ep; ``rows``: the dim with a length that depends on
    the routing; ``slots``: the dim of slots, with those of several ranks. ``axis``: over which values are typed; tp if
    every rank has all experts."""

    experts: int = -1
    rows: int = -1
    slots: int = -1
    axis: str = "etp"


ROWS, STACK = Domain(rows=0), Domain(experts=0)


def domain_of(node: fx.Node) -> Domain | None:
    """None for a value outside of it."""
    return node.meta.get("domain")


def counts_rows(node: fx.Node) -> bool:
    """Whether the length of a value's first dim, and of no other, follows the routing."""
    domain = domain_of(node)
    return domain is not None and domain.rows == 0


def axis_of(node: fx.Node) -> str:
    """The axis over which a value is typed."""
    domain = domain_of(node)
    return "tp" if domain is None else domain.axis


def in_domain(node: fx.Node, shape: tuple[int, ...], mesh: Sizes) -> tuple[int, ...]:
    """``shape`` of a value with its experts sharded over ep, and the slots of all senders; rows as if none left."""
    domain = domain_of(node)
    if domain is None:
        return shape
    local = list(shape)
    if domain.experts >= 0:
        local[domain.experts] //= mesh.ep
    if domain.slots >= 0:
        local[domain.slots] = share_of_slots(local[domain.slots], mesh) * mesh.ep * mesh.etp
    return tuple(local)


def share_of_slots(slots: int, mesh: Sizes) -> int:
    """How many slots of an expert one rank sends of those that all ranks of tp have."""
    return ceil(slots / mesh.tp)


def share_of_rows(node: fx.Node, mesh: Sizes) -> float:
    """The rows that a rank has when every expert gets as many, as a part of those in the graph."""
    domain = domain_of(node)
    return 1.0 if domain is None or domain.rows < 0 else mesh.etp / mesh.tp


# ---- new calls


class Builder:
    """Adds calls before ``place``, as of the line of ``like``."""

    def __init__(self, graph: fx.Graph, place: fx.Node, like: fx.Node) -> None:
        self.graph, self.place, self.like = graph, place, like

    def call(
        self,
        function: Any,
        *args: Any,
        val: Any = None,
        grad: bool | None = None,
        domain: Domain | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """``val``: left out, found by running the op on its arguments' meta values. ``grad``: left out, whether an
        argument has one."""
        if val is None:
            given, options = fx.map_arg((args, kwargs), lambda n: bare(n.meta["val"]))
            val = bare(function(*given, **options))
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = {key: self.like.meta[key] for key in COPIED if key in self.like.meta}
        floats = isinstance(val, tuple | list) or val.dtype.is_floating_point
        found = floats and any(n.meta.get("grad") for n in node.all_input_nodes)
        node.meta |= {"val": val, "grad": found if grad is None else grad}
        if domain is not None:
            node.meta["domain"] = domain
        return node


def arguments_with(node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call with other nodes in the place of some."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: own.get(n, n))
    return tuple(args), dict(kwargs)


def bare(value: Any) -> Any:
    """Tensors of the same shapes and dtypes on the meta device."""
    return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), value)


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase calls that have no readers left, from ``nodes`` up."""
    work, erased = list(nodes), set[fx.Node]()
    while work:
        node = work.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            work += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)
