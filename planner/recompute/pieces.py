"""A piece: the part of one block that is recomputed together. A block is one, or one for each of its captured parts.

A CUDA graph holds its own recompute: the captured backward contains the rerun for the tensors that its forward freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.pieces import Piece
from passes.regions import Region
from planner.decisions import Decisions


def pieces_of(kinds: Mapping[int, str], decisions: Decisions, regions: Sequence[Region]) -> list[Piece]:
    """The pieces of the blocks that ``kinds`` names, with their nodes."""
    region_of = {name: region.index for region in regions if not region.refused for name in sorted(region.nodes)}
    pieces: list[Piece] = []
    for block in decisions.blocks.instances:
        if block.index not in kinds:
            continue
        parts: dict[tuple[int, int | None], list[str]] = {}
        for node in decisions.calls_of(block):
            place = decisions.stages.stage_of[node.name], region_of.get(node.name)
            parts.setdefault(place, []).append(node.name)
        for (stage, region), names in parts.items():
            pieces.append(Piece(len(pieces), stage, block.path, kinds[block.index], frozenset(names), region))
    return pieces
