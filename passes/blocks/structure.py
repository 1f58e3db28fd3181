"""When two groups of nodes are the same block: equal operations, shapes, arguments and edges. No name is looked at.

A node's signature is its operation, its arguments without tensors and without the values of floats, and the shapes,
types and gradient flag of its value. A group's kind is the hash of its nodes' signatures, of its edges counted from its
own first node, and of its outside inputs, in the order of first reading.

Blocks that are calls of modules are the repeated or listed ones among the calls that a model was traced in. Every node
knows the chain of module calls that it was traced in (``nn_module_stack``), which gives a tree of calls. Blocks are
calls with one parent that follow each other in the flow of data and repeat a kind or are in one list:

    layers.0  layers.1  layers.2  layers.3          one list of kind A: four blocks
    blocks["a"] blocks["b"] blocks["c"]             kinds A B A: three blocks
    shared(shared(shared(x)))                       one module called three times: three blocks
    encoder.layers.*  …  decoder.layers.*           two lists, both found

The outermost list counts (the linears inside a block are no blocks), unless its members are nothing but lists of blocks
themselves. Experts, towers, or q, k and v stand side by side, not one after the other, and are no blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
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
        """Return the hash of a node by itself; also notes its operands, in order and with repetition."""
        operands = self.operands[node] = []
        arguments = _skeleton((node.args, dict(node.kwargs)), operands)
        return hash((str(node.target), arguments, _value_key(node)))

    def kind(self, group: Group) -> Any:
        """Return the hash of the structure of ``group``."""
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
            shared = {o for o in outside if o.name in self.roles and any(user not in position for user in o.users)}
            read = [(self.roles.get(o.name), _value_key(o), o in shared) for o in outside]
            self._kinds[group] = hash((tuple(tokens), tuple(read)))
        return self._kinds[group]

    def externals(self, group: Group) -> dict[fx.Node, int]:
        """Return the outside inputs of ``group``, numbered in order of first reading."""
        inside, found = set(group.nodes), {}
        for node in group.nodes:
            for operand in self.operands[node]:
                if operand not in inside:
                    found.setdefault(operand, len(found))
        return found

    def representatives(self, groups: Iterable[Group]) -> dict[str, str]:
        """Map each node to the node of the first group of its kind that it repeats; parameters follow their readers."""
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
    """Return an argument without its tensors and without the values of its floats (a dropout rate decides nothing)."""
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


# A block with inner blocks that do at least this share of its work is only their container (a stage of stages of
# layers).
CONTAINER_SHARE = 0.9


def module_blocks(structure: Structure) -> list[Group]:
    """Return the blocks that are module calls: of two products or more (linears, attention), else of one."""
    search = _Search(structure)
    root = _call_tree(structure.flops)
    return search.below(root, 2) or search.below(root, 1)


class _Search:
    """Owns one fact of each kind: whether it only contains blocks."""

    def __init__(self, structure: Structure) -> None:
        self.kind = structure.kind
        self._is_container: dict[Any, bool] = {}

    def below(self, call: Group, least: int) -> list[Group]:
        """Return the blocks below ``call``; a block has at least ``least`` products (linears, attention)."""
        members = self._members(call, least)
        found = []
        for child in call.children.values():
            if child.num_products < least:
                continue
            if child not in members or self._only_contains(child, least):
                found += self.below(child, least)
            else:
                found.append(child)
        return found

    def _only_contains(self, call: Group, least: int) -> bool:
        """Return whether ``call`` is a container of repeated blocks rather than a block; decided once for each kind."""
        kind = self.kind(call)
        if kind not in self._is_container:
            self._is_container[kind] = False  # a call inside itself is not looked into again
            inner = self.below(call, least) if least > 1 else []
            repeats = len(inner) > len({self.kind(c) for c in inner})
            share = sum(c.flops for c in inner)
            self._is_container[kind] = repeats and share >= CONTAINER_SHARE * call.flops
        return self._is_container[kind]

    def _members(self, parent: Group, least: int) -> set[Group]:
        """Return the child calls of ``parent`` that are blocks: repeated kinds, and others in a list with them."""
        children = [c for c in parent.children.values() if c.num_products >= least]
        if not children:
            return set()
        reach = _reach(parent, children)
        by_kind, by_container = defaultdict(list), defaultdict(list)
        for child in children:
            by_container[child.path.rpartition(".")[0]].append(child)  # a list's own path, or the parent module's
        if len(children) > 1:
            for child in children:
                by_kind[self.kind(child)].append(child)
        members = {c for group in by_kind.values() if len(group) > 1 and _follow(group, reach) for c in group}
        for container, listed in by_container.items():
            if container != parent.path:
                # calls of different kinds follow each other; a single one must hold no blocks
                is_list = _follow(listed, reach) if len(listed) > 1 else not self.below(listed[0], least)
                if is_list or members.intersection(listed):
                    members.update(listed)
            else:
                members.update(_between(listed, members))
        return members


def _call_tree(flops_of: Mapping[fx.Node, int]) -> Group:
    """Return the calls that nodes were traced in, below one root; a module called again is another call."""
    root = Group("")
    for node, flops in flops_of.items():
        if node.op != "call_function":
            continue
        call = root
        call.add(node, flops)
        for key, value in (node.meta.get("nn_module_stack") or {}).items():
            if key not in call.children:
                call.children[key] = Group(str(value[0]).removeprefix("L['self']").lstrip("."))
            call = call.children[key]
            call.add(node, flops)
    return root


def _reach(parent: Group, children: list[Group]) -> dict[Group, int]:
    """Return for each child call a bit mask of the child calls that it depends on, itself included."""
    bit = {node: 1 << i for i, child in enumerate(children) for node in child.nodes}
    mask: dict[fx.Node, int] = {}
    for node in parent.nodes:
        reached = bit.get(node, 0)
        for operand in node.all_input_nodes:
            reached |= mask.get(operand, 0)
        mask[node] = reached
    result = Counter[Group]()
    for child in children:
        for node in child.nodes:
            result[child] |= mask[node]
    return dict(result)


def _follow(calls: list[Group], reach: dict[Group, int]) -> bool:
    """Return whether most calls depend on the one before: a chain, not things side by side."""
    position = {call: i for i, call in enumerate(reach)}
    linked = sum(bool(reach[b] >> position[a] & 1) for a, b in pairwise(calls))
    return 2 * linked > len(calls) - 1


def _between(siblings: list[Group], members: set[Group]) -> list[Group]:
    """Return the siblings from the first member to the last."""
    at = [i for i, call in enumerate(siblings) if call in members]
    return siblings[at[0] : at[-1] + 1] if at else []
