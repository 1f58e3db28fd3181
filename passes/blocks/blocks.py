"""Find the repeated blocks of a captured model: by structure, never by a name.

There are two sources, and each part of the model takes the better one:

    calls of modules        transformer.h.0, transformer.h.1, …      if a layer is a module that is called
    repetition of the code  one period of the operations             if it is not: functional code in a loop, layers
                                                                     used piece by piece, residuals added by the parent

Calls are taken if they hold nearly all of the repetition and no more bytes cross the cuts between them.
"""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import fx

from passes.blocks.live_sets import anchors, live_values, recomputed_nodes
from passes.blocks.periods import BlockRun, Flow, find_runs, live_bytes
from passes.blocks.structure import CONTAINER_SHARE, Group, Structure, module_blocks
from passes.errors import Where
from passes.program.ops.aten import value_bytes
from passes.program.program import Program
from passes.program.source_lines import module_of, where_of

# Calls that hold less than this of a repetition's work, or of its nodes, are parts of its blocks.
_CALLS_SHARE = 0.9
# A repetition beside module blocks (a head of two equal linears) counts only from this share of their work on.
_BESIDE_SHARE = 0.1
_TOLERANCE = 1.05


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

    ``representative`` maps every node of the graph, placeholders included; nodes outside of blocks, and nodes that
    blocks share (tied parameters, the module applied twice), map to themselves. ``times``: the number of blocks of the
    model that each one represents, in a folded program; empty: one.
    """

    instances: tuple[Block, ...]
    representative: dict[str, str]
    times: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model, represented ones included."""
        return sum(self.times) or len(self.instances)

    def times_of_nodes(self, program: Program) -> dict[str, int]:
        """Map each node name to the number of nodes of the model that it represents, if more than one: the nodes of a
        block, and the parameters that only it reads."""
        if not self.times:
            return {}
        block_of = self.block_of()
        found = {name: self.times[index] for name, index in block_of.items() if self.times[index] > 1}
        for node in program.graph.graph.nodes:
            if node.op == "placeholder":
                reading = {block_of.get(user.name) for user in node.users}
                index = reading.pop() if len(reading) == 1 else None
                if index is not None and self.times[index] > 1:
                    found[node.name] = self.times[index]
        return found

    @property
    def num_kinds(self) -> int:
        return len({block.kind for block in self.instances})

    def block_of(self) -> dict[str, int]:
        """Map each node name to the index of the block that holds it (nodes outside of blocks are absent)."""
        return {name: block.index for block in self.instances for name in block.nodes}


def find_blocks(program: Program) -> Blocks:
    """Return the blocks of ``program``; none if nothing repeats. n log n in its nodes."""
    structure, recomputed = Structure(program), recomputed_nodes(program)
    groups = in_order(module_blocks(structure), structure)
    for repetition in _repetitions(program, structure, recomputed):
        choice = _Choice(program, structure, recomputed, groups, repetition)
        if choice.is_better:
            groups = in_order(choice.replaced, structure)
    kinds: dict[Any, int] = {}
    for group in groups:
        kinds.setdefault(structure.kind(group), len(kinds))
    instances = tuple(
        Block(i, kinds[structure.kind(group)], path, tuple(n.name for n in group.nodes))
        for i, (group, path) in enumerate(zip(groups, _paths(program, structure, groups), strict=True))
    )
    return Blocks(instances, structure.representatives(groups))


def in_order(groups: list[Group], structure: Structure) -> list[Group]:
    """Sort groups by their last call: ops of a block on its weights alone may come long before it."""
    return sorted(groups, key=lambda group: structure.order[group.nodes[-1]])


def _repetitions(program: Program, structure: Structure, recomputed: set[fx.Node]) -> list[list[Group]]:
    """Each repetition in the operations, as its blocks. Values that every stage recomputes are letters of no word."""
    nodes = [n for n in structure.nodes if n.op == "call_function" and n not in recomputed]
    if len(nodes) < 2:
        return []
    position = {node: i for i, node in enumerate(nodes)}
    edges = [(position[o], i) for i, node in enumerate(nodes) for o in node.all_input_nodes if o in position]
    # a tuple cannot be sent: a cut between it and its pieces is worse than one after them
    num_bytes = [value_bytes(n) * (2 if isinstance(n.meta.get("val"), (tuple, list)) else 1) for n in nodes]
    edge_array = np.array(edges, dtype=np.int64).reshape(-1, 2)
    tokens = np.unique([structure.signature[n] for n in nodes], return_inverse=True)[1]
    flow = Flow(
        tokens,
        np.array([structure.flops[n] for n in nodes]),
        edge_array,
        live_bytes(edge_array, np.array(num_bytes, dtype=np.int64)),
    )
    return [_groups(runs, nodes, structure, recomputed) for runs in find_runs(flow)]


def _groups(runs: list[BlockRun], nodes: list[fx.Node], structure: Structure, recomputed: set[fx.Node]) -> list[Group]:
    """The blocks of ``runs``, each with the recomputed calls within it that it alone reads (a transposed weight)."""
    starts = [s for run in runs for s in range(run.start, run.end, run.period)]
    ends = [s + run.period for run in runs for s in range(run.start, run.end, run.period)]
    home = {node: b for b, (start, end) in enumerate(zip(starts, ends, strict=True)) for node in nodes[start:end]}
    of_weights: set[fx.Node] = set()
    for node in structure.nodes:
        read = node.all_input_nodes
        if node in recomputed and any(n in of_weights or structure.roles.get(n.name) == "parameters" for n in read):
            of_weights.add(node)
    for node in reversed(structure.nodes):
        readers = {home.get(user) for user in node.users} if node in recomputed else {None}
        reader = readers.pop() if len(readers) == 1 else None
        if reader is not None:
            # a node before a block's first call is its own only if it is of a weight: a mask is made for several
            is_within = structure.order[node] > structure.order[nodes[starts[reader]]]
            if is_within or node in of_weights:
                home[node] = reader
    groups = [Group("") for _ in starts]
    for node in structure.nodes:
        if node in home:
            groups[home[node]].add(node, structure.flops[node])
    return groups


@dataclass
class _Choice:
    """Between ``repetition`` and those of ``groups`` that it overlaps."""

    program: Program
    structure: Structure
    recomputed: set[fx.Node]
    groups: list[Group]
    repetition: list[Group]

    def __post_init__(self) -> None:
        self.inside = {node for group in self.repetition for node in group.nodes if node not in self.recomputed}
        self.touching = [group for group in self.groups if not self.inside.isdisjoint(group.nodes)]
        self.replaced = [group for group in self.groups if group not in self.touching] + self.repetition

    @property
    def is_better(self) -> bool:
        work = sum(group.flops for group in self.repetition)
        if not self.touching:
            return work >= _BESIDE_SHARE * sum(group.flops for group in self.groups)
        if work < CONTAINER_SHARE * sum(group.flops for group in self.touching):
            return False  # it is a part of the calls
        shared = [node for group in self.touching for node in group.nodes if node in self.inside]
        if sum(self.structure.flops[node] for node in shared) < _CALLS_SHARE * work:
            return True
        after = self._crossing(self.repetition, self.replaced)
        # whether the calls contain several blocks of some size each
        are_coarse = len(self.repetition) >= 2 * len(self.touching) and all(g.num_products > 1 for g in self.repetition)
        if len(shared) < _CALLS_SHARE * len(self.inside) or are_coarse:
            return len(self.touching) == 1 or after <= _TOLERANCE * self._crossing(self.touching, self.groups)
        return len(self.touching) > 1 and _TOLERANCE * after < self._crossing(self.touching, self.groups)

    def _crossing(self, own: list[Group], groups: list[Group]) -> float:
        """Return the median of the bytes that cross a cut between two of ``own``, if ``groups`` are the blocks."""
        groups = in_order(groups, self.structure)
        block_of = {node.name: i for i, group in enumerate(groups) for node in group.nodes}
        live = live_values(anchors(self.program, block_of, self.recomputed), len(groups))
        sizes = [
            sum(value_bytes(self.program.node(name)) for name in names)
            for names, (a, b) in zip(live, pairwise(groups), strict=True)
            if a in own and b in own
        ]
        return float(np.median(sizes)) if sizes else 0.0


def _paths(program: Program, structure: Structure, groups: list[Group]) -> list[str]:
    """Return a name of each block for display: a call's own path, else the common prefix of its parameters' names."""
    read = [
        frozenset(fqn for node in structure.externals(group) if (fqn := program.parameters.get(node.name)))
        for group in groups
    ]
    prefixes = [group.path or _common_prefix(names) for group, names in zip(groups, read, strict=True)]
    readers: dict[str, set[frozenset[str]]] = {}
    for prefix, names in zip(prefixes, read, strict=True):
        readers.setdefault(prefix, set()).add(names)
    return [
        prefix if group.path or (prefix and len(readers[prefix]) == 1) else f"{prefix} block {i}".strip()
        for i, (group, prefix) in enumerate(zip(groups, prefixes, strict=True))
    ]


def _common_prefix(fqns: frozenset[str]) -> str:
    first, last = min(fqns, default="").split("."), max(fqns, default="").split(".")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return ".".join(first[:same])


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class Places:
    """Owns the places found so far: a model of 9,000 nodes has some 50 distinct lines."""

    def __init__(self, blocks: Blocks) -> None:
        self._lines: dict[str, Where] = {}
        self._block = {name: block.path for block in blocks.instances for name in block.nodes}

    def where(self, node: fx.Node) -> Where:
        """Return the module and the user's line of a node; a parameter has the place of its first reader."""
        if node.op == "placeholder" and node.users:
            node = next(iter(node.users))
        trace = node.meta.get("stack_trace") or ""
        if trace not in self._lines:
            self._lines[trace] = where_of(node)
        return replace(self._lines[trace], module=module_of(node))

    def text(self, node: fx.Node) -> str:
        return str(self.where(node))

    def block(self, node: fx.Node) -> str:
        """Return the path of the block that holds a node; "" outside of blocks."""
        return self._block.get(node.name, "")


def glob_of(fqn: str) -> str:
    """Return a dotted name with a star for each number: the same module in every block."""
    return _NUMBER.sub("*", fqn)
