"""What one capture shows of the sequences of its batch: found when it is asked for, and once.

A capture of one sequence has the batch on a dim of size 1, or on none:

    [1, t, h] → [t, 1, h]     permuted: followed by the rules of ops
    [t, 1, h] → [t, h]        merged into t (as its inner part) or h (its outer one), not if a weight has that dim
    [t, h] → [t, 1, h]        a dim of its own again

Of several places that would do, all are looked at; of several dims of size 1 at one place that of the same number, or
the first. What is found asks for a capture of more sequences, which shows what is so.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from math import prod

from torch import fx

from passes.partition.batch import mixing
from passes.partition.batch.orders import Runs, addresses, batch_size, crosses
from passes.partition.batch.restored_orders import RestoredOrder, restored_orders
from passes.program.ops.aten import aten, is_pointwise, packet_of, shape_of
from passes.program.ops.groups import FILLED, JOINS, RESHAPES
from passes.program.ops.own_backward import OwnBackward
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.rules.rule import RESULT, Factor, OpRule, Role, operands_of
from passes.rules.table import rule_of

Places = frozenset[tuple[int, int]]  # (dim, elements of it behind the batch); of a dim of its own (dim, 1)


class Sequences:
    """Owns the facts of ``program`` before anything is rewritten. ``on_batch``: nodes made of the batch's values."""

    def __init__(self, program: Program) -> None:
        self.program, self.on_batch, self.size = program, mixing.follows_batch(program), batch_size(program)
        self._along: dict[frozenset[fx.Node], list[fx.Node]] = {}

    @cached_property
    def orders(self) -> list[RestoredOrder]:
        """The orders of rows that are sorted by expert and come back: they keep sequences apart."""
        return restored_orders(self.program.graph.graph, self.on_batch)

    @cached_property
    def runs(self) -> Runs:
        """The dims that hold the batch."""
        return mixing.batch_runs(self.program, self.on_batch, self.orders)

    def computed_along(self, loss: Collection[fx.Node]) -> list[fx.Node]:
        """Return values before ``loss`` that may mix sequences."""
        key = frozenset(loss)
        if key not in self._along:
            orders = [o for o in self.orders if self.size == 1 or all(self.runs[node] is not None for node in o.back)]
            apart = {node for order in orders for node in (*order.inside, *order.back)}
            found = mixing.computed_along(self.program, self.on_batch, loss)
            self._along[key] = [node for node in found if node not in apart]
        return self._along[key]

    def may_be_mixed(self, inner: Collection[fx.Node]) -> bool:
        """Return whether one of ``inner`` may mix the sequences; more of them would show it."""
        if self.size != 1:
            flow = mixing.dims_of(self.runs)
            unknown = [n for n in inner if any(flow.get(x) is None for x in operands_of(n))]
            mixed = (mixing.mixes(n, flow.get) for n in inner)
            return any(mixing.may_mix(n, self.on_batch) for n in unknown) or any(mixed)
        one = OneSequence(self.program, self.on_batch, self.orders)
        unknown = [
            n for n in inner if isinstance(n.target, OwnBackward) or not any(map(one.places.get, n.all_input_nodes))
        ]
        return (
            any(mixing.may_mix(node, self.on_batch) for node in unknown)
            or any(mixing.may_repeat_batch(node) for node in inner)
            or any(map(one.may_mix, inner))
        )


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
        """Return whether an op mixes rows, or takes some of them, along a dim that may hold the batch."""
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
            is_alone = any(shape_of(read[0])[dim] == 1 for dim, _ in self.places.get(read[0], ()))
            return is_alone and any(shape_of(node)[dim] > 1 for dim, _ in self.places.get(node, ()))
        if addresses(node):
            return crosses(node, held)
        if node.target in RESHAPES:
            return any(not seen_as(shape_of(read[0]), place, shape_of(node)) for place in self.places[read[0]])
        rule = None if node.target in JOINS else rule_of(node)
        if rule is not None and not is_pointwise(node.target) and self._is_unfactored(read, rule):
            return True
        return rule is not None and any(
            factor.role is not Role.EACH or mixing.pairs(rule, factor, held) for _, _, factor in self._along(node, rule)
        )

    def _counts_sequences(self, node: fx.Node) -> bool:
        """Return whether it is made of numbers that may count the one sequence."""
        if node in self.on_batch or node in self._fixed:
            return False
        made = [n for n in walk([node], operands) if n.op == "call_function" and not n.all_input_nodes]
        # with other elements at each place, as arange, linspace and eye have
        return any(n.target not in FILLED and shape_of(n) in ((1,), (1, 1)) for n in made)

    def _is_unfactored(self, read: Sequence[fx.Node], rule: OpRule) -> bool:
        """Return whether a rule says nothing on a dim of size 1 with the batch, as that of a convolution along it."""
        held = [(i, dim) for i, n in enumerate(read) for dim, _ in self.places.get(n, ()) if shape_of(n)[dim] == 1]
        return any(i not in rule.unread and not rule.along(i, dim) for i, dim in held)

    def _along(self, node: fx.Node, rule: OpRule) -> Iterator[tuple[int, tuple[int, int], Factor]]:
        """Yield (operand, place, factor) of all that may be; a dim of a weight holds no batch."""
        for i, operand in enumerate(operands_of(node)):
            for place in () if i in rule.unread else self.places.get(operand, ()):
                for factor in rule.along(i, place[0]):
                    if not any(operands_of(node)[p.operand] in self._fixed for p in factor.places if p.operand >= 0):
                        yield i, place, factor

    def _of(self, node: fx.Node) -> Places:
        read = operands_of(node)
        if isinstance(node.target, OwnBackward):
            return next((self.places.get(n, frozenset()) for n in read if shape_of(n) == shape_of(node)), frozenset())
        if node.target in RESHAPES:
            if "unsqueezed" in node.meta:
                new = node.meta["unsqueezed"]
                return frozenset((dim + (dim >= new), behind) for dim, behind in self.places.get(read[0], ()))
            found = (seen_as(shape_of(read[0]), place, shape_of(node)) for place in self.places.get(read[0], ()))
            return frozenset().union(*found)
        if node.target in JOINS:
            return frozenset().union(*(self.places.get(n, frozenset()) for n in read))
        rule, found = rule_of(node), set[tuple[int, int]]()
        for _, (_, behind), factor in self._along(node, rule) if rule is not None else ():
            place = factor.at(RESULT)
            if place is not None:
                found.add((place.dim, place.inner * behind))
        return frozenset(found)


def seen_as(before: tuple[int, ...], place: tuple[int, int], after: tuple[int, ...]) -> Places:
    """Return the places of a reshape: a dim of its own if there is one, else in the dims beside it."""
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
