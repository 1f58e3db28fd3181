"""When two groups of nodes are the same block: equal operations, shapes, arguments and edges. No name is looked at.

A node's signature is its operation, its arguments without tensors and without the values of floats, and the shapes,
types and gradient flag of its value. A group's kind is the hash of its nodes' signatures, of its edges counted from its
own first node, and of its outside inputs, in the order of first reading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes.program.ops.aten import tensors_of
from passes.program.program import Program
from passes.rules.flops import node_flops


@dataclass(eq=False, slots=True)
class Group:
    """Nodes that are, or may be, one block, in graph order. For a call of a module also the calls inside of it."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    children: dict[str, Group] = field(default_factory=dict)
    num_products: int = 0
    flops: int = 0

    def add(self, node: fx.Node, flops: int) -> None:
        self.nodes.append(node)
        self.num_products += flops > 0
        self.flops += flops

    @property
    def container(self) -> str:
        """The dotted path of the module's container: a list's own path, or the parent module's."""
        return self.path.rpartition(".")[0]


class Structure:
    """Owns facts that are computed once: the signature, operands and FLOPs of each node, the kind of each group."""

    def __init__(self, program: Program) -> None:
        self.roles = {name: role for role in ("parameters", "buffers", "constants") for name in getattr(program, role)}
        self.nodes = list(program.graph.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.operands: dict[fx.Node, list[fx.Node]] = {}
        self.flops = {node: node_flops(node) for node in self.nodes}
        self.signature = {node: self._signature(node) for node in self.nodes}
        self._kinds: dict[Group, Any] = {}

    def _signature(self, node: fx.Node) -> int:
        """Hash of a node by itself; also notes its operands, in order and with repetition."""
        operands = self.operands[node] = []
        arguments = _skeleton((node.args, dict(node.kwargs)), operands)
        return hash((str(node.target), arguments, _value_key(node)))

    def kind(self, group: Group) -> Any:
        """Hash of the structure of ``group``."""
        if group not in self._kinds:
            position = {node: i for i, node in enumerate(group.nodes)}
            outside = self.externals(group)
            tokens = [
                (
                    self.signature[node],
                    tuple(i - position[o] if o in position else ~outside[o] for o in self.operands[node]),
                    any(user not in position for user in node.users),
                )
                for i, node in enumerate(group.nodes)
            ]
            read = [(self.roles.get(o.name), _value_key(o), self._is_shared(o, position)) for o in outside]
            self._kinds[group] = hash((tuple(tokens), tuple(read)))
        return self._kinds[group]

    def _is_shared(self, operand: fx.Node, inside: dict[fx.Node, int]) -> bool:
        return operand.name in self.roles and any(user not in inside for user in operand.users)

    def externals(self, group: Group) -> dict[fx.Node, int]:
        """The outside inputs of ``group``, numbered in order of first reading."""
        inside, found = set(group.nodes), {}
        for node in group.nodes:
            for operand in self.operands[node]:
                if operand not in inside:
                    found.setdefault(operand, len(found))
        return found

    def representatives(self, groups: Iterable[Group]) -> dict[str, str]:
        """Node → the node of the first group of its kind that it repeats; parameters follow their readers."""
        groups = list(groups)
        first: dict[Any, Group] = {}
        same = {node.name: node.name for node in self.nodes}
        inside = {node for group in groups for node in group.nodes}
        wanted: dict[fx.Node, set[str]] = defaultdict(set)
        for group in groups:
            model = first.setdefault(self.kind(group), group)
            same.update((a.name, b.name) for a, b in zip(group.nodes, model.nodes, strict=True))
            for a, b in zip(self.externals(group), self.externals(model), strict=True):
                if a.name in self.roles and all(user in inside for user in a.users):
                    wanted[a].add(b.name)
        same.update((node.name, names.pop()) for node, names in wanted.items() if len(names) == 1)
        return same


def _value_key(node: fx.Node) -> tuple[Any, ...]:
    return (*((tuple(t.shape), t.dtype) for t in tensors_of(node)), bool(node.meta.get("grad")))


def _skeleton(argument: Any, operands: list[fx.Node]) -> Any:
    """An argument without its tensors and without the values of its floats (a dropout rate decides nothing)."""
    if isinstance(argument, fx.Node):
        operands.append(argument)
        return fx.Node
    if isinstance(argument, (tuple, list)):
        return tuple([_skeleton(a, operands) for a in argument])
    if isinstance(argument, dict):
        return tuple([(key, _skeleton(a, operands)) for key, a in argument.items()])
    if isinstance(argument, float):
        return float
    return argument if isinstance(argument, (int, str, type(None))) else str(argument)
