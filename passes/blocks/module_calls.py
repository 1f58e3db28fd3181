"""Blocks that are calls of modules: the repeated or listed ones among the calls that a model was traced in.

Every node knows the chain of module calls that it was traced in (``nn_module_stack``), which gives a tree of calls.
Blocks are calls with one parent that follow each other in the flow of data and repeat a kind or are in one list:

    layers.0  layers.1  layers.2  layers.3          one list of kind A: four blocks
    blocks["a"] blocks["b"] blocks["c"]             kinds A B A: three blocks
    shared(shared(shared(x)))                       one module called three times: three blocks
    encoder.layers.*  …  decoder.layers.*           two lists, both found

The outermost list counts (the linears inside a block are no blocks), unless its members are nothing but lists of blocks
themselves. Experts, towers, or q, k and v stand side by side, not one after the other, and are no blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import fx

from passes.blocks.structure import Group, Structure

# A block with inner blocks that do at least this share of its work is only their container (a stage of stages of
# layers).
CONTAINER_SHARE = 0.9


def module_blocks(structure: Structure) -> list[Group]:
    """The blocks that are module calls: of two products or more (linears, attention), else of one."""
    search = _Search(structure)
    root = _call_tree(structure.flops)
    return search.below(root, 2) or search.below(root, 1)


class _Search:
    """Owns one fact of each kind: whether it only contains blocks."""

    def __init__(self, structure: Structure) -> None:
        self.kind = structure.kind
        self._is_container: dict[Any, bool] = {}

    def below(self, call: Group, least: int) -> list[Group]:
        """The blocks below ``call``; a block has at least ``least`` products (linears, attention)."""
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
        """Whether ``call`` is a container of repeated blocks rather than a block; decided once for each kind."""
        kind = self.kind(call)
        if kind not in self._is_container:
            self._is_container[kind] = False  # a call inside itself is not looked into again
            inner = self.below(call, least) if least > 1 else []
            repeats = len(inner) > len({self.kind(c) for c in inner})
            share = sum(c.flops for c in inner)
            self._is_container[kind] = repeats and share >= CONTAINER_SHARE * call.flops
        return self._is_container[kind]

    def _members(self, parent: Group, least: int) -> set[Group]:
        """The child calls of ``parent`` that are blocks: repeated kinds, and others in a list with them."""
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

    def _is_list(self, calls: list[Group], reach: dict[Group, int], least: int) -> bool:
        """Whether calls of different kinds under one container follow each other; a single one must hold no blocks."""
        return _follow(calls, reach) if len(calls) > 1 else not self.below(calls[0], least)


def _call_tree(flops_of: Mapping[fx.Node, int]) -> Group:
    """The calls that nodes were traced in, below one root; a module called again is another call."""
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
    """For each child call a bit mask of the child calls that it depends on, itself included."""
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
    """Whether most calls depend on the one before: a chain, not things side by side."""
    position = {call: i for i, call in enumerate(reach)}
    linked = sum(bool(reach[b] >> position[a] & 1) for a, b in pairwise(calls))
    return 2 * linked > len(calls) - 1


def _between(siblings: list[Group], members: set[Group]) -> list[Group]:
    """The siblings from the first member to the last."""
    at = [i for i, call in enumerate(siblings) if call in members]
    return siblings[at[0] : at[-1] + 1] if at else []
