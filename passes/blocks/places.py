"""Places for the rows: lines of the user's code, and blocks; looked up once for each distinct line."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import fx

from passes.blocks.blocks import Blocks
from passes.errors import Where
from passes.program.source_lines import module_of, where_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class Places:
    """Owns the places found so far: a model of 9,000 nodes has some 50 distinct lines."""

    def __init__(self, blocks: Blocks) -> None:
        self._lines: dict[str, Where] = {}
        self._block = {name: block.path for block in blocks.instances for name in block.nodes}

    def where(self, node: fx.Node) -> Where:
        """Module and the user's line of a node; a parameter has the place of its first reader."""
        if node.op == "placeholder" and node.users:
            node = next(iter(node.users))
        trace = node.meta.get("stack_trace") or ""
        if trace not in self._lines:
            self._lines[trace] = where_of(node)
        return replace(self._lines[trace], module=module_of(node))

    def text(self, node: fx.Node) -> str:
        return str(self.where(node))

    def block(self, node: fx.Node) -> str:
        """The path of the block that holds a node; "" outside of blocks."""
        return self._block.get(node.name, "")


def glob_of(fqn: str) -> str:
    """A dotted name with a star for each number: the same module in every block."""
    return _NUMBER.sub("*", fqn)
