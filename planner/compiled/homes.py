"""The home of a call: its region and block. No piece spans two homes, and no path enters one twice.

region   the captured part of a block: a piece is inside of its graph or outside
block    the recomputed block, and whether its backward reruns the call: a piece is rerun entirely or not at all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.pieces import Piece
from passes.program.ops.aten import is_view
from passes.program.ops.groups import RESHAPES
from passes.regions import Region


@dataclass(frozen=True, slots=True)
class Home:
    """``region`` and ``block`` by index, None outside of all; ``again``: the block's backward runs it once more."""

    region: int | None = None
    block: int | None = None
    again: bool = False


OUTSIDE = Home()


class Homes:
    """Of one stage. Owns: captured name → its region, its recomputed block, and the calls that its backward reruns."""

    def __init__(self, stage: int, regions: Sequence[Region], recomputed: Sequence[Piece]) -> None:
        mine = [region for region in regions if region.stage == stage and not region.refused]
        self._region = {name: region.index for region in mine for name in sorted(region.nodes)}
        blocks = [piece for piece in recomputed if piece.stage == stage]
        self._block = {name: piece.index for piece in blocks for name in sorted(piece.nodes)}
        self._again = {call.name for piece in blocks for call in piece.again if call.changed is None}
        self.num_regions = len(mine)

    def of_calls(self, calls: Sequence[fx.Node]) -> dict[fx.Node, Home]:
        """``calls`` of the lowered stage in their order. A view is rerun if its base is."""
        found: dict[fx.Node, Home] = {}
        for node in calls:
            name = node.meta["origin"]
            region, block = self._region.get(name), self._block.get(name)
            source = found.get(node.all_input_nodes[0]) if is_free(node) and node.all_input_nodes else None
            again = source.again if source is not None and source.block == block else name in self._again
            found[node] = Home(region, block, again)
        return found


def is_free(node: fx.Node) -> bool:
    """Whether a call makes no values of its own."""
    return node.target in RESHAPES or is_view(node)
