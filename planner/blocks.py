"""Find the repeated blocks of a captured model: by structure, never by a name.

Every node knows the chain of module calls that it was traced in (``nn_module_stack``), which gives a tree of calls. A
call's kind is the hash of its nodes: ops, shapes, arguments and edges counted from its own first node. Blocks are calls
with one parent that follow each other in the flow of data and either repeat a kind or stand in one list:

    layers.0  layers.1  layers.2  layers.3          one list of kind A: four blocks
    blocks["a"] blocks["b"] blocks["c"]             kinds A B A: three blocks
    shared(shared(shared(x)))                       one module called three times: three blocks
    encoder.layers.*  …  decoder.layers.*           two lists, both found

The outermost list counts (the linears inside a block are no blocks), unless its members are nothing but lists of blocks
themselves. Experts, towers, or q, k and v stand side by side, not one after the other, and are no blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx

from planner.capture import Program
from planner.flops import node_flops, tensors_of

# A block whose inner blocks do at least this share of its work is only their container (a stage of stages of layers).
_CONTAINER_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Block:
    """One application of a block. ``kind`` is equal for equal structure (up to floating-point constants)."""

    index: int
    kind: int
    path: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks in execution order, and which node of the first block of a kind each node of another one repeats.

    ``representative`` maps every node of the graph, placeholders included; what is in no block, and what blocks share
    (tied parameters, the module applied twice), maps to itself.
    """

    instances: tuple[Block, ...]
    representative: dict[str, str]

    @property
    def num_kinds(self) -> int:
        return len({block.kind for block in self.instances})

    def first_of_kind(self) -> dict[int, Block]:
        """Kind → its first block."""
        first: dict[int, Block] = {}
        for block in self.instances:
            first.setdefault(block.kind, block)
        return first

    def block_of(self) -> dict[str, int]:
        """Node name → index of the block that holds it (nodes outside of blocks are absent)."""
        return {name: block.index for block in self.instances for name in block.nodes}


def find_blocks(program: Program) -> Blocks:
    """The blocks of ``program``, in time proportional to its nodes; none where nothing repeats or is listed."""
    finder = _Finder(program)
    calls = finder.search(finder.root, 2) or finder.search(finder.root, 1)
    calls.sort(key=lambda call: finder.order[call.nodes[0]])
    kinds: dict[Any, int] = {}
    for call in calls:
        kinds.setdefault(finder.kind(call), len(kinds))
    instances = tuple(Block(i, kinds[finder.kind(call)], call.path, tuple(n.name for n in call.nodes))
                      for i, call in enumerate(calls))
    return Blocks(instances, finder.representatives(calls))


@dataclass(eq=False, slots=True)
class _Call:
    """One call of one module: its nodes (those of inner calls too) and its inner calls, in execution order."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    children: dict[str, _Call] = field(default_factory=dict)
    num_products: int = 0
    flops: int = 0

    @property
    def container(self) -> str:
        """The dotted path of what holds the module: a list's own path, or the parent module's."""
        return self.path.rpartition(".")[0]


class _Finder:
    """Owns the tree of calls and what is computed once for each node: its signature and its operands."""

    def __init__(self, program: Program) -> None:
        self.roles = {name: role for role in ("parameters", "buffers", "constants") for name in getattr(program, role)}
        nodes = list(program.graph.graph.nodes)
        self.order = {node: i for i, node in enumerate(nodes)}
        self.operands: dict[fx.Node, list[fx.Node]] = {}
        self.signature = {node: self._signature(node) for node in nodes}
        self.root = _call_tree(nodes)
        self._kinds: dict[_Call, Any] = {}
        self._is_container: dict[Any, bool] = {}

    def _signature(self, node: fx.Node) -> int:
        """Hash of what a node is by itself; also notes its operands, in order and with repetition."""
        operands = self.operands[node] = []
        arguments = _skeleton((node.args, dict(node.kwargs)), operands)
        return hash((str(node.target), arguments, _value_key(node)))

    def search(self, call: _Call, least: int) -> list[_Call]:
        """The blocks below ``call``; a block has at least ``least`` products (linears, attention)."""
        members = self._members(call, least)
        found = []
        for child in call.children.values():
            if child.num_products < least:
                continue
            if child not in members or self._only_contains(child, least):
                found += self.search(child, least)
            else:
                found.append(child)
        return found

    def _only_contains(self, call: _Call, least: int) -> bool:
        """Whether ``call`` is a container of repeated blocks rather than a block; asked once for each kind."""
        kind = self.kind(call)
        if kind not in self._is_container:
            self._is_container[kind] = False  # a call inside itself is not looked into again
            inner = self.search(call, least) if least > 1 else []
            repeats = len(inner) > len({self.kind(c) for c in inner})
            share = sum(c.flops for c in inner)
            self._is_container[kind] = repeats and share >= _CONTAINER_SHARE * call.flops
        return self._is_container[kind]

    def _members(self, parent: _Call, least: int) -> set[_Call]:
        """The child calls of ``parent`` that are blocks: repeated kinds, and whatever stands in a list with them."""
        children = [c for c in parent.children.values() if c.num_products >= least]
        if not children:
            return set()
        reach = _reach(parent, children)
        by_kind, by_container = defaultdict(list), defaultdict(list)
        for child in children:
            by_container[child.container].append(child)
        if len(children) > 1:
            for child in children:
                by_kind[self.kind(child)].append(child)
        members = {c for group in by_kind.values() if len(group) > 1 and _follow(group, reach) for c in group}
        for container, listed in by_container.items():
            if container != parent.path:
                if members.intersection(listed) or self._is_list(listed, reach, least):
                    members.update(listed)
            else:
                members.update(_between(listed, members))
        return members

    def _is_list(self, calls: list[_Call], reach: dict[_Call, int], least: int) -> bool:
        """Whether calls of different kinds under one container follow each other; a single one must hold no blocks."""
        return _follow(calls, reach) if len(calls) > 1 else not self.search(calls[0], least)

    def kind(self, call: _Call) -> Any:
        """Hash of the structure of ``call``."""
        if call not in self._kinds:
            position = {node: i for i, node in enumerate(call.nodes)}
            outside = self._externals(call)
            tokens = [(self.signature[node],
                       tuple(i - position[o] if o in position else ~outside[o] for o in self.operands[node]),
                       any(user not in position for user in node.users))
                      for i, node in enumerate(call.nodes)]
            read = [(self.roles.get(o.name), _value_key(o), self._is_shared(o, position)) for o in outside]
            self._kinds[call] = hash((tuple(tokens), tuple(read)))
        return self._kinds[call]

    def _is_shared(self, operand: fx.Node, inside: dict[fx.Node, int]) -> bool:
        return operand.name in self.roles and any(user not in inside for user in operand.users)

    def _externals(self, call: _Call) -> dict[fx.Node, int]:
        """What ``call`` reads from outside, numbered in order of first reading."""
        inside, found = set(call.nodes), {}
        for node in call.nodes:
            for operand in self.operands[node]:
                if operand not in inside:
                    found.setdefault(operand, len(found))
        return found

    def representatives(self, calls: list[_Call]) -> dict[str, str]:
        first: dict[Any, _Call] = {}
        same = {node.name: node.name for node in self.order}
        inside = {node for call in calls for node in call.nodes}
        wanted: dict[fx.Node, set[str]] = defaultdict(set)
        for call in calls:
            model = first.setdefault(self.kind(call), call)
            same.update((a.name, b.name) for a, b in zip(call.nodes, model.nodes, strict=True))
            for a, b in zip(self._externals(call), self._externals(model), strict=True):
                if a.name in self.roles and all(user in inside for user in a.users):
                    wanted[a].add(b.name)
        same.update((node.name, names.pop()) for node, names in wanted.items() if len(names) == 1)
        return same


def _call_tree(nodes: Iterable[fx.Node]) -> _Call:
    """The calls that ``nodes`` were traced in, below one root; a module called again is another call."""
    root = _Call("")
    for node in nodes:
        if node.op != "call_function":
            continue
        flops = node_flops(node)
        call = root
        _note(call, node, flops)
        for key, value in (node.meta.get("nn_module_stack") or {}).items():
            if key not in call.children:
                call.children[key] = _Call(str(value[0]).removeprefix("L['self']").lstrip("."))
            call = call.children[key]
            _note(call, node, flops)
    return root


def _note(call: _Call, node: fx.Node, flops: int) -> None:
    call.nodes.append(node)
    call.num_products += flops > 0
    call.flops += flops


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


def _reach(parent: _Call, children: list[_Call]) -> dict[_Call, int]:
    """For each child call a bit mask of the child calls that it depends on, itself included."""
    bit = {node: 1 << i for i, child in enumerate(children) for node in child.nodes}
    mask: dict[fx.Node, int] = {}
    for node in parent.nodes:
        reached = bit.get(node, 0)
        for operand in node.all_input_nodes:
            reached |= mask.get(operand, 0)
        mask[node] = reached
    result = Counter[_Call]()
    for child in children:
        for node in child.nodes:
            result[child] |= mask[node]
    return dict(result)


def _follow(calls: list[_Call], reach: dict[_Call, int]) -> bool:
    """Whether most calls depend on the one before: a chain, not things side by side."""
    position = {call: i for i, call in enumerate(reach)}
    linked = sum(bool(reach[b] >> position[a] & 1) for a, b in pairwise(calls))
    return 2 * linked > len(calls) - 1


def _between(siblings: list[_Call], members: set[_Call]) -> list[_Call]:
    """The siblings from the first member to the last."""
    at = [i for i, call in enumerate(siblings) if call in members]
    return siblings[at[0]:at[-1] + 1] if at else []
