"""Loops over the batch: which parts a graph takes a value apart into, and what values made of parts become together.

    for row in logits: …                 one sequence each: more sequences are more parts
    for piece in rows.split(1024): …     so many rows each, if they divide a microbatch
    for piece in rows.chunk(4): …        more sequences are longer parts

    f(x₀) + f(x₁) + …                    SHARE, if the parts cover the batch and are treated alike
    cat([f(x₀), f(x₁), …])               ROWS, if they are in the batch's order (of chunks' shares: LOOSE)

For sequences one by one the second graph must have as many more terms as it has sequences, alike again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from passes.partition.batch.align_exports import TwoCaptures, pieces_of, spine_of, terms_of
from passes.partition.loss.kinds import (
    LOOSE,
    MEANS,
    ROWS,
    SHARE,
    UNIT,
    UNKNOWN,
    WHOLE,
    BatchPart,
    Kind,
    are_complete,
    share,
    tile,
    unknown,
)
from passes.program.known_values import Constants
from passes.program.ops.aten import aten, cut_of, dim_of_cat, splits
from passes.program.ops.groups import WITH_SIZES

MOST_VALUES = 4096  # of a constant that is compared by value
UNITS, CHUNKS, UNEVEN = "units", "chunks", "uneven chunks"
Given = Callable[[fx.Node, fx.Node], Kind]  # of a reader, and of the value
ByRule = Callable[[fx.Node, Sequence[Kind]], Kind]


class Parts:
    """Owns the known cuts of each value along the batch. ``constants``: those of the second graph."""

    def __init__(self, captures: TwoCaptures, first: fx.Graph, second: fx.Graph, constants: Constants) -> None:
        self.captures, self._constants = captures, constants
        self._alike = _alike(first) | _alike(second)
        self._second, self._first = second, {other: node for node, other in captures.others.items()}
        self._read: dict[fx.Node, tuple[int, frozenset[tuple[Fraction, Fraction]]]] = {}
        self._how: dict[tuple[fx.Node, int], str | None] = {}

    def how(self, source: fx.Node, dim: int) -> str | None:
        """Return UNITS, CHUNKS or UNEVEN; None if the parts are not all of ``source``."""
        if (source, dim) not in self._how:
            self._how[source, dim] = self._compared(source, dim)
        return self._how[source, dim]

    def of(self, source: fx.Node, dim: int, start: int, stop: int) -> BatchPart:
        size = source.meta["val"].shape[dim]
        return BatchPart(Fraction(start, size), Fraction(stop, size), self.how(source, dim) != UNEVEN)

    def _compared(self, source: fx.Node, dim: int) -> str | None:
        other = self.captures.others.get(source)
        if other is None:
            return None
        size, larger = source.meta["val"].shape[dim], other.meta["val"].shape[dim]
        here, there = self._ranges(source, dim) or [(0, size)], self._ranges(other, dim)
        if not tile(here, size) or not tile(there, larger):
            return None
        repeated = [(i * size + a, i * size + b) for i in range(larger // size) for a, b in here]
        if there == repeated:
            return UNITS
        return CHUNKS if all(len({b - a for a, b in ranges}) == 1 for ranges in (here, there)) else UNEVEN

    def go_on_alike(self, terms: Sequence[fx.Node], num_ways: int, *, in_order: bool) -> bool:
        """Whether the second graph's ``terms`` are made in no more than ``num_ways``, each of a part of its own."""
        if not self._read:
            self._read_second()
        read = [self._read[t] for t in terms if self._read[t][1]]
        parts = [sorted(part) for _, part in read]
        return (
            (not in_order or parts == sorted(parts))
            and all(len(parts) == 1 for _, parts in read)
            and len(set(read)) == len(read)
            and (len({like for like, _ in read}) == num_ways)
        )

    def _read_second(self) -> None:
        """Note for every node of the second graph how it is made, and of which parts (of one length)."""
        likeness = Likeness(self._constants)
        for node in self._second.nodes:
            if node.op == "output":
                continue
            cut = cut_of(node)
            of = {}
            if node in self._constants.nodes:
                parts = frozenset[tuple[Fraction, Fraction]]()
            elif cut is not None and self._is_of_batch(*cut[:2]):
                size = cut[0].meta["val"].shape[cut[1]]
                of = {node: cut[0]}
                parts = frozenset({(Fraction(cut[2], size), Fraction(cut[3], size))})
            else:
                parts = frozenset().union(*(self._read[n][1] for n in node.all_input_nodes))
            self._read[node] = likeness.note(node, of), parts

    def _is_of_batch(self, source: fx.Node, dim: int) -> bool:
        """Return whether cuts of the second graph take a value apart along the batch, and not one of its sequences."""
        known = [self._first[n] for n in self._alike[source] if n in self._first]
        changed = [self.captures.changed(n) for n in known]
        is_along = any(dims is None or dim in dims for dims in changed) if known else not self._read[source][1]
        return is_along and tile(self._ranges(source, dim), source.meta["val"].shape[dim])

    def _ranges(self, source: fx.Node, dim: int) -> list[tuple[int, int]]:
        """Return the ranges of cuts of ``source``, or of an equal value, along ``dim``."""
        alike = self._alike[source]
        users = [user for node in alike for user in node.users]
        cuts = [cut_of(r) for user in users for r in ((*user.users, user) if splits(user) else (user,))]
        return sorted({(cut[2], cut[3]) for cut in cuts if cut is not None and cut[0] in alike and cut[1] == dim})


def _alike(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to all nodes that are equal: the same ops on the same inputs."""
    likeness, groups = Likeness(), {}
    numbers = {node: likeness.note(node, {}) for node in graph.nodes if node.op != "output"}
    for node, number in numbers.items():
        groups.setdefault(number, []).append(node)
    return {node: groups[number] for node, number in numbers.items()}


class Likeness:
    """Numbers for how values are made: the same for calls of one op on operands alike, whichever part they are of.

    ``constants``: those of the graph; they are alike if their values are.
    """

    def __init__(self, constants: Constants | None = None) -> None:
        self._constants = constants
        self._numbers: dict[Any, int] = {}
        self._of: dict[fx.Node, int] = {}

    def note(self, node: fx.Node, part_of: dict[fx.Node, fx.Node]) -> int:
        """Number how ``node`` is made. ``part_of``: operand (or the node itself) → the value that it is a part of."""

        def token(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return ("part", self._of[part_of[value]]) if value in part_of else self._of[value]
            return tuple(map(token, value)) if isinstance(value, (list, tuple)) else repr(value)

        if node.op != "call_function":
            key: Any = node
        elif (values := self._values(node)) is not None:
            key = values
        elif node.target is aten.add.Tensor and isinstance(node.args[1], (int, float)) and node.args[1] == 0:
            self._of[node] = self._of[node.all_input_nodes[0]]  # so begins Python's sum()
            return self._of[node]
        elif node in part_of:
            key = "part", self._of[part_of[node]]
        else:
            args = node.args[:1] if node.target in WITH_SIZES else node.args
            val = node.meta.get("val")
            ndim = val.dim() if isinstance(val, torch.Tensor) else -1
            key = str(node.target), token(args), token(sorted(node.kwargs.items())), ndim
        self._of[node] = self._numbers.setdefault(key, len(self._numbers) + 1)
        return self._of[node]

    def _values(self, node: fx.Node) -> Any:
        """Return the values of a constant that is not large."""
        value = node.meta.get("val")
        if self._constants is None or node not in self._constants.nodes or not isinstance(value, torch.Tensor):
            return None
        known = self._constants.value(node) if value.numel() <= MOST_VALUES else None
        return None if known is None else (known.dtype, tuple(known.shape), tuple(known.flatten().tolist()))


class Joins:
    """Sums and concatenations of parts. ``kinds``: those so far. ``given``: the kind of a value as a call reads it;
    ``by_rule``: that of any op's result. Owns ``apart``: joins of parts that do not cover the batch.
    """

    def __init__(self, parts: Parts, kinds: dict[fx.Node, Kind], given: Given, by_rule: ByRule) -> None:
        self.captures, self.parts, self.kinds, self.given, self.by_rule = parts.captures, parts, kinds, given, by_rule
        self.apart: list[fx.Node] = []

    def sum(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Type a + b; the last of a chain of additions knows whether all parts of the batch are in it."""
        joined = self.captures.joins.get(node)
        if spine_of(node) and not self._is_inner(node) and (joined is None or joined.target is aten.add.Tensor):
            kinds = [self.kinds[t] for t in terms_of(node)]
            parted = [k for k in kinds if k.part is not None]
            if len({k.part for k in parted}) > 1 or node in self.captures.more:
                return self._all_parts(node, parted, [k for k in kinds if k.part is None])
        return self.by_rule(node, given)

    def _is_inner(self, node: fx.Node) -> bool:
        user = next(iter(node.users), None)
        return len(node.users) == 1 and user is not None and user.target is aten.add.Tensor and node in spine_of(user)

    def _all_parts(self, node: fx.Node, parted: list[Kind], others: list[Kind]) -> Kind:
        enough = self.goes_on(node, parted, self.captures.others.get(node))
        linear = all(k.name in (UNIT, SHARE) for k in parted) and all(k.name in (SHARE, WHOLE) for k in others)
        if not (parted and enough and linear and are_complete(parted)):
            self.apart.append(node)
            return unknown
        self.kinds.update((inner, share) for inner in spine_of(node))
        return share

    def goes_on(self, node: fx.Node, parted: list[Kind], other: fx.Node | None) -> bool:
        """Return whether the second graph has as many more terms as it has sequences, of sequences alike."""
        units = [k for k in parted if k.name == UNIT]
        if not units:
            return True
        if other is None or self.captures.more.get(node, 0) != len(units) * (self.captures.times - 1):
            return False
        is_cat = other.target is aten.cat.default
        joined = pieces_of(other) if is_cat else terms_of(other)
        return self.parts.go_on_alike(joined, len({k.like for k in units}), in_order=is_cat)

    def linear(self, given: Sequence[Kind]) -> Kind:
        moving = [k for k in given if k.name != WHOLE]
        if len({(k.name, k.part) for k in moving}) > 1:
            return unknown
        means = any(k.order == MEANS for k in moving)
        return replace(moving[0], order=MEANS if means else None, like=0)

    def cat(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        pieces: Any = node.args[0]
        kinds = [self.given(node, n) for n in pieces]
        dim = dim_of_cat(node)
        parts = {k.part for k in kinds if k.name != WHOLE or k.part is not None}
        if len(parts) > 1 or (node in self.captures.more and None not in parts):
            return self._all_pieces(node, kinds, dim)
        if all(k.name == ROWS and k.dim == dim for k in kinds):
            sizes = tuple(Fraction(n.meta["val"].shape[dim], pieces[0].meta["val"].shape[dim]) for n in pieces)
            alike = len({(k.part, k.order) for k in kinds}) == 1
            return Kind(ROWS, dim, kinds[0].part, ("cat", sizes, kinds[0].order)) if alike else unknown
        if node in self.captures.more and any(k.name == UNKNOWN for k in kinds):
            self.apart.append(node)
        return self.by_rule(node, given)

    def _all_pieces(self, node: fx.Node, kinds: list[Kind], dim: int) -> Kind:
        starts = [k.part.start for k in kinds if k.part is not None]
        ordered = len(starts) == len(kinds) and starts == sorted(starts)
        one_way = len({(k.name, k.dim, k.order, k.like) for k in kinds}) == 1
        if ordered and one_way and are_complete(kinds):
            name = kinds[0].name
            if name == UNIT and self.goes_on(node, kinds, self.captures.others.get(node)):
                return Kind(ROWS, dim)
            if name == ROWS and kinds[0].dim == dim and kinds[0].order is None:
                return Kind(ROWS, dim)
            if name == SHARE:
                return Kind(LOOSE, dim)
        self.apart.append(node)
        return unknown
