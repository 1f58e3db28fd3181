"""Whether ops may run along the batch in a capture of one sequence, which has it on a dim of size 1, or on none.

    [1, t, h] → [t, 1, h]     permuted: followed by the rules of ops
    [t, 1, h] → [t, h]        merged into t (as its inner part) or h (its outer one), not if a weight has that dim
    [t, h] → [t, 1, h]        a dim of its own again

Of several places that would do, all are looked at; of several dims of size 1 at one place that of the same number, or
the first. What is found asks for a capture of more sequences, which shows what is so.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod

from torch import fx

from passes.partition.batch.addressed_rows import addresses, crosses
from passes.partition.batch.restored_orders import RestoredOrder
from passes.program.ops.aten import aten, is_pointwise, packet_of, shape_of
from passes.program.ops.groups import FILLED, JOINS, RESHAPES
from passes.program.ops.own_backward import OwnBackward
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, Factor, OpRule, Role
from passes.rules.table import rule_of

Places = frozenset[tuple[int, int]]  # (dim, elements of it behind the batch); of a dim of its own (dim, 1)


class OneSequence:
    """Owns ``places``: node → where the batch may be."""

    def __init__(self, program: Program, on_batch: Collection[fx.Node], orders: Iterable[RestoredOrder]) -> None:
        nodes, self.on_batch = program.graph.graph.nodes, on_batch
        self._fixed = {*walk([n for n in nodes if n.name in program.parameters], readers)}.difference(on_batch)
        back = {node for order in orders for node in order.back}
        inside = {node for order in orders for node in order.inside}.difference(back)
        self.places: dict[fx.Node, Places] = {}
        for node in nodes:
            if node.name in program.inputs:
                self.places[node] = frozenset({(0, 1)} if shape_of(node) else ())
            elif node in back:
                self.places[node] = frozenset({(0, shape_of(node)[0])})
            elif node.op == "call_function" and node in on_batch and node not in inside:
                self.places[node] = self._of(node)

    def may_mix(self, node: fx.Node) -> bool:
        """Whether an op mixes rows, or takes some of them, along a dim that may hold the batch."""
        if node.op != "call_function" or isinstance(node.target, OwnBackward):
            return False
        read = operands_of(node)
        held = [frozenset(dim for dim, _ in self.places.get(n, ())) for n in read]
        if not any(held):
            return False
        if any(dim in n.meta.get("cut_whole", ()) for n in (node, *read) for dim, _ in self.places.get(n, ())):
            return True
        if any(self._counts_sequences(n) for n in read):
            return True
        if packet_of(node.target) is aten.expand:
            return any(shape_of(node)[place[0]] > 1 for place in self.places.get(node, ()) if self._is_alone(read[0]))
        if addresses(node):
            return crosses(node, held)
        if node.target in RESHAPES:
            return any(not _seen_as(shape_of(read[0]), place, shape_of(node)) for place in self.places[read[0]])
        rule = None if node.target in JOINS else rule_of(node)
        if rule is not None and not is_pointwise(node.target) and self._is_unfactored(read, rule):
            return True
        return rule is not None and any(
            factor.role is not Role.EACH or self._pairs(node, factor) for _, _, factor in self._along(node, rule)
        )

    def _counts_sequences(self, node: fx.Node) -> bool:
        """Whether it is made of numbers that may count the one sequence."""
        if node in self.on_batch or node in self._fixed:
            return False
        return any(_is_numbered(n) and shape_of(n) in ((1,), (1, 1)) for n in walk([node], operands))

    def _is_unfactored(self, read: Sequence[fx.Node], rule: OpRule) -> bool:
        """Whether a rule says nothing on a dim of size 1 with the batch, as that of a convolution along it."""
        held = [(i, dim) for i, n in enumerate(read) for dim, _ in self.places.get(n, ()) if shape_of(n)[dim] == 1]
        return any(i not in rule.unread and not rule.along(i, dim) for i, dim in held)

    def _is_alone(self, node: fx.Node) -> bool:
        return any(shape_of(node)[dim] == 1 for dim, _ in self.places.get(node, ()))

    def _along(self, node: fx.Node, rule: OpRule) -> Iterator[tuple[int, tuple[int, int], Factor]]:
        """(operand, place, factor) of all that may be; a dim of a weight holds no batch."""
        for i, operand in enumerate(operands_of(node)):
            for place in () if i in rule.unread else self.places.get(operand, ()):
                for factor in rule.along(i, place[0]):
                    if not any(operands_of(node)[p.operand] in self._fixed for p in factor.places if p.operand >= 0):
                        yield i, place, factor

    def _pairs(self, node: fx.Node, factor: Factor) -> bool:
        """Whether another operand holds the batch on other dims alone."""
        for i, operand in enumerate(operands_of(node)):
            held, place = self.places.get(operand), factor.at(i)
            if held and (place is None or all(dim != place.dim for dim, _ in held)):
                return True
        return False

    def _of(self, node: fx.Node) -> Places:
        read = operands_of(node)
        if isinstance(node.target, OwnBackward):
            return next((self.places.get(n, frozenset()) for n in read if shape_of(n) == shape_of(node)), frozenset())
        if node.target in RESHAPES:
            if "unsqueezed" in node.meta:
                new = node.meta["unsqueezed"]
                return frozenset((dim + (dim >= new), behind) for dim, behind in self.places.get(read[0], ()))
            found = (_seen_as(shape_of(read[0]), place, shape_of(node)) for place in self.places.get(read[0], ()))
            return frozenset().union(*found)
        if node.target in JOINS:
            return frozenset().union(*(self.places.get(n, frozenset()) for n in read))
        rule, found = rule_of(node), set[tuple[int, int]]()
        for _, (_, behind), factor in self._along(node, rule) if rule is not None else ():
            place = factor.at(RESULT)
            if place is not None:
                found.add((place.dim, place.inner * behind))
        return frozenset(found)


def _is_numbered(node: fx.Node) -> bool:
    """Whether an op makes other elements at each place out of numbers alone, as arange, linspace and eye do."""
    return node.op == "call_function" and not node.all_input_nodes and node.target not in FILLED


def _seen_as(before: tuple[int, ...], place: tuple[int, int], after: tuple[int, ...]) -> Places:
    """The places of a reshape: a dim of its own if there is one, else in the dims beside it."""
    dim, behind = place
    rest = prod(before[dim + 1 :]) * behind
    own = [d for d, n in enumerate(after) if n == 1 and prod(after[d + 1 :]) == rest]
    if own:
        return frozenset({(dim if dim in own else own[0], 1)})
    found = set[tuple[int, int]]()
    for d, n in enumerate(after):
        inner = prod(after[d + 1 :])
        if n > 1 and inner and inner <= rest <= inner * n and rest % inner == 0:
            found.add((d, rest // inner))
    return frozenset(found)
