"""The dim of rows of each value, followed through calls that act on each row alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from passes.moe.refusals import Refusal
from passes.moe.ties import Ties, is_grouped
from passes.program.ops.aten import draws, is_pointwise
from passes.rules.call import operands_of
from passes.rules.rule import Role
from passes.rules.table import rule_of


@dataclass
class Rows:
    """``known``: value → the dim of ``size`` that counts the rows."""

    size: int
    known: dict[fx.Node, int] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)

    def follow(self, node: fx.Node) -> int | None:
        """The dim of a call's rows, if all that it reads of them agrees; None where it has none."""
        found = {
            place[0]
            for value in node.all_input_nodes
            if value in self.known
            for n, place in self.ties.through(node, value, (self.known[value], 1), self.size)
            if n is node and place[1] == 1
        }
        if len(found) != 1:
            return None
        self.known[node] = found.pop()
        return self.known[node]


def dims_of_stacks(
    stacks: Mapping[fx.Node, int], made: Iterable[fx.Node], size: int, refusal: Refusal
) -> dict[fx.Node, int]:
    """The dim of experts of each stack, and of each value made of stacks alone."""
    rows = Rows(size, dict(stacks))
    for node in sorted(made):
        if node not in stacks and rows.follow(node) is None:
            raise refusal(node, "the stack of experts changes its layout")
    return rows.known


def keeps_rows(node: fx.Node, rows: Mapping[fx.Node, int]) -> bool:
    """Whether each row that a call makes is made of that row alone. A grouped product has its rows by position, and
    the ends of the experts' runs move with them."""
    if is_grouped(node):
        return True
    rule = rule_of(node)
    if rule is None or (draws(node.target) and not is_pointwise(node.target)):
        return False
    held = [(i, rows[n]) for i, n in enumerate(operands_of(node)) if n in rows]
    return all(factor.role is Role.EACH for place in held for factor in rule.along(*place))
