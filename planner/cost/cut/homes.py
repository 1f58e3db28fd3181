"""The unit of each call of a stage: a unit is a block with the calls that are anchored to it.

a call                  the unit that it is anchored to; computed in every stage that reads it (masks, rotary
                        tables): the units of its readers
a change of partial sums    the unit that made them, for they are summed before they are sent
any other change of type    the units of its readers
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx

from passes.blocks.live_sets import (
    before_and_after_blocks,
    live_values,
    needed_anchors,
    recomputed_nodes,
    stages_of_copies,
)
from passes.partition.type_changes import TypeChange
from planner.decisions import Decisions
from planner.saved.trace import Call

Units = tuple[int, ...]


class Homes:
    """Of one captured program. ``ends``: the calls before the first block, and those after the last, are units too."""

    def __init__(self, decisions: Decisions, *, ends: bool = False) -> None:
        program, block_of = decisions.program, decisions.blocks.block_of()
        self.program, self.num_units = program, max(1, len(decisions.blocks.instances))
        self.anchor = needed_anchors(program, block_of, recomputed_nodes(program))
        if ends:
            before, after = before_and_after_blocks(self.anchor, block_of, self.num_units - 1)
            shifted = {node: 0 if node in before else unit + 1 for node, unit in self.anchor.items()}
            self.anchor = shifted | dict.fromkeys(sorted(after), self.num_units + 1)
            self.num_units += 2
        self._of_node: dict[str, Units] = {node.name: (unit,) for node, unit in self.anchor.items()}
        for node, units in stages_of_copies(program, self.anchor).items():
            self._of_node.setdefault(node.name, units)

    def of_name(self, name: str) -> Units:
        return self._of_node.get(name, ()) or (0,)

    def of_call(self, call: Call) -> Units:
        return self.of_name(call.name) if call.changed is None else self.of_change(call.changed)

    def of_change(self, change: TypeChange) -> Units:
        if change.before.kind == "P":
            return self.of_name(change.value)
        units = {u for name in change.readers if name not in ("send", "loss") for u in self.of_name(name)}
        return tuple(sorted(units)) if units else self.of_name(change.value)[-1:]

    @cached_property
    def live(self) -> tuple[tuple[str, ...], ...]:
        """For each cut between two units, the values that cross it."""
        return live_values(self.anchor, self.num_units)

    @cached_property
    def of_placeholder(self) -> dict[str, Units]:
        """Parameter, buffer or constant → the units that read it."""
        nodes = (n for n in self.program.graph.graph.nodes if n.op == "placeholder")
        return {node.name: self._of_node.get(node.name, ()) for node in nodes}


def following(program_nodes: list[fx.Node], inputs: set[str], flow: dict[fx.Node, frozenset[int] | None]) -> set[str]:
    """Names of the values that are as many times as large as a microbatch has sequences.

    A value that is expanded to the batch without reading it, as a mask may be, does not count.
    """
    found, on_batch = set[str](), set[fx.Node]()
    for node in program_nodes:
        if node.name in inputs or any(n in on_batch for n in node.all_input_nodes):
            on_batch.add(node)
            dims = flow.get(node)
            value: Any = node.meta.get("val")
            sizes = value if isinstance(value, (tuple, list)) else (value,)
            numel = sum(int(v.numel()) for v in sizes if hasattr(v, "numel"))
            if numel > 1 and (dims is None or dims):
                found.add(node.name)
    return found
