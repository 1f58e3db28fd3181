"""fold(program, blocks): the same model with fewer blocks, so that deciding a cut costs as much as for a few layers.

    kinds    a a a a a a a b b b b b        a a a b b b        of a row of equal blocks three are left:
    source   0 1 1 1 1 1 2 3 4 4 4 5                           the first, one between, the last

The first block follows something unique (an embedding), and the last precedes a head; those between are alike, so one
represents all. Readers of a row's results then read the remaining blocks. A model is folded only if that is exact: the
results of the blocks in between are read by their neighbours alone, and only blocks compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from passes.blocks.blocks import Block, Blocks
from passes.blocks.live_sets import needed_anchors, recomputed_nodes, stages_of_copies
from passes.program.copied import copied, program_of
from passes.program.program import Program

_LEFT = 3  # blocks of a row: the first, one between, the last


@dataclass(frozen=True, slots=True)
class Folded:
    """``source``: for each block of the model, the index in ``blocks`` that represents it; it ascends."""

    program: Program
    blocks: Blocks
    source: tuple[int, ...]

    @property
    def is_folded(self) -> bool:
        return len(self.source) > len(self.blocks.instances)


def fold(program: Program, blocks: Blocks) -> Folded:
    """A copy of ``program`` with three blocks of each row of equal ones; with all of them if that is not exact."""
    rows = [row for row in _rows(blocks) if len(row) > _LEFT and _is_foldable(program, blocks, row)]
    whole = Folded(copied(program), blocks, tuple(range(len(blocks.instances))))
    if not rows:
        return whole
    dropped = {block.index for row in rows for block in row[2:-1]}
    names = {name for block in blocks.instances if block.index in dropped for name in block.nodes}
    folded = _without(program, names, _instead(blocks, rows))
    if folded is None:
        return whole
    kept = [block for block in blocks.instances if block.index not in dropped]
    source = tuple(_stands_for(block.index, kept, rows) for block in blocks.instances)
    there = {node.name for node in folded.graph.graph.nodes}
    times = Counter(source)
    return Folded(
        folded,
        Blocks(
            tuple(replace(block, index=index) for index, block in enumerate(kept)),
            {name: same for name, same in blocks.representative.items() if name in there},
            tuple(times[index] for index in range(len(kept))),
        ),
        source,
    )


def _rows(blocks: Blocks) -> list[list[Block]]:
    return [list(row) for _, row in groupby(blocks.instances, key=lambda block: block.kind)]


def _is_foldable(program: Program, blocks: Blocks, row: list[Block]) -> bool:
    """Whether each of those that go is read by the next block alone, all read the same masks and tables, and no call
    outside of blocks belongs to them, or to a block before them though it comes later."""
    block_of, going = blocks.block_of(), {block.index for block in row[2:-1]}
    homes = _homes_outside(program, block_of)
    if going & set(homes.values()):
        return False
    order = {node.name: at for at, node in enumerate(program.graph.graph.nodes)}
    start = min(order[name] for name in row[2].nodes)
    if any(order[name] > start and home < row[2].index for name, home in homes.items()):
        return False
    for block in row[2:-1]:
        for name in block.nodes:
            readers = {block_of.get(user.name) for user in program.node(name).users}
            if readers - {block.index, block.index + 1}:
                return False
    shared = _read_of_all(program, blocks, row[1])
    if any(_read_of_all(program, blocks, block) != shared for block in row[2:-1]):
        return False
    inverse = {blocks.representative[name] for name in row[1].nodes}
    return all(blocks.representative[name] in inverse for name in row[-2].nodes)


def _homes_outside(program: Program, block_of: Mapping[str, int]) -> dict[str, int]:
    """Call outside all blocks → the first block of its stage."""
    anchor = needed_anchors(program, block_of, recomputed_nodes(program))
    homes = {node.name: home for node, home in anchor.items()}
    for node, units in stages_of_copies(program, anchor).items():
        if node.op == "call_function" and units:
            homes.setdefault(node.name, units[0])
    return {name: home for name, home in homes.items() if name not in block_of}


def _read_of_all(program: Program, blocks: Blocks, block: Block) -> set[str]:
    """The operands of ``block`` that belong to no block: a mask of some layers alone is not read by the others."""
    operands = {n.name for name in block.nodes for n in program.node(name).all_input_nodes}
    block_of = blocks.block_of()
    return {name for name in operands if name not in block_of and blocks.representative.get(name, name) == name}


def _instead(blocks: Blocks, rows: list[list[Block]]) -> dict[str, str]:
    """Node of the last block that goes → the node of the one between that stays, which repeats it."""
    instead: dict[str, str] = {}
    for row in rows:
        own = {blocks.representative[name]: name for name in row[1].nodes}
        instead.update((name, own[blocks.representative[name]]) for name in row[-2].nodes)
    return instead


def _without(program: Program, dropped: set[str], instead: dict[str, str]) -> Program | None:
    """The program without these nodes, with other nodes as inputs of their readers; None if a node would lose all
    readers.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for node in program.graph.graph.nodes:
        if node.name in dropped or (node.op == "placeholder" and node.users and _read_by(node) <= dropped):
            continue
        env[node.name] = graph.node_copy(node, lambda n: env[instead.get(n.name, n.name)])
        env[node.name].name = node.name
    idle = [name for name, node in env.items() if node.op == "call_function" and not node.users]
    if any(program.node(name).users for name in idle):
        return None
    return program_of(program, graph)


def _read_by(node: fx.Node) -> set[str]:
    return {user.name for user in node.users}


def _stands_for(index: int, kept: list[Block], rows: list[list[Block]]) -> int:
    """The place among ``kept`` of the block that represents the block ``index``."""
    row = next((row for row in rows if row[2].index <= index < row[-1].index), None)
    own = index if row is None else row[1].index
    return next(place for place, block in enumerate(kept) if block.index == own)
