"""The chosen typing of every node over tp, and over etp among experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from passes.moe.domain import axis_of
from passes.partition.options.table import Option
from passes.types.types import Placement


@dataclass(frozen=True)
class Placements:
    """The chosen option of every node (parameters included), by node name.

    ``origins``: "solver", or the override that decided. ``styles``: the overrides' styles, of the parameters that they
    decided.
    ``etp``: the size of the axis over which values in the experts' domain are typed.
    """

    tp: int
    options: dict[str, Option]
    origins: dict[str, str]
    styles: dict[str, str] = field(default_factory=dict)
    etp: int = 0

    def size(self, node: fx.Node) -> int:
        """Ranks over which the value of ``node`` is typed."""
        return self.tp if axis_of(node) == "tp" else self.etp or self.tp

    def of(self, node: fx.Node) -> Placement:
        """The type of the value that ``node`` makes."""
        return self.options[node.name].out

    def wanted(self, node: fx.Node, position: int) -> Placement:
        """The type in which ``node`` reads its ``position``-th input (order of ``all_input_nodes``)."""
        return self.options[node.name].args[position]

    def reads_unchanged(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether ``node`` reads ``operand`` in the type of its value: no conversion stands between them."""
        return self.wanted(node, node.all_input_nodes.index(operand)) == self.of(operand)
