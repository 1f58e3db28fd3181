"""The kinds of sums and concatenations, which may combine values made of parts of the batch.

    f(x₀) + f(x₁) + …            SHARE, if the parts cover the batch and are treated alike
    cat([f(x₀), f(x₁), …])       ROWS, if they are in the batch's order (of chunks' shares: LOOSE)

For sequences one by one the second graph must have as many more terms as it has sequences, alike again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import fx

from passes.partition.batch.two_captures import TwoCaptures, aten, pieces_of, spine_of, terms_of
from passes.partition.loss.kinds import LOOSE, MEANS, ROWS, SHARE, UNIT, WHOLE, Kind, are_complete, unknown
from passes.partition.loss.loss_ops import share as shared
from passes.partition.loss.parts import Parts


class Joins(ABC):
    """``apart``: joins of parts that do not cover the batch."""

    captures: TwoCaptures
    kinds: dict[fx.Node, Kind]
    apart: list[fx.Node]
    _parts: Parts

    @abstractmethod
    def _given(self, reader: fx.Node, node: fx.Node) -> Kind:
        """The kind of ``node`` as ``reader`` reads it."""

    @abstractmethod
    def _by_rule(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """The kind of any op's result, from those of its operands."""

    def _sum(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """a + b; and the last of a chain of additions knows whether all parts of the batch are in it."""
        joined = self.captures.joins.get(node)
        if spine_of(node) and not self._is_inner(node) and (joined is None or joined.target is aten.add.Tensor):
            kinds = [self.kinds[t] for t in terms_of(node)]
            parted = [k for k in kinds if k.part is not None]
            if len({k.part for k in parted}) > 1 or node in self.captures.more:
                return self._all_parts(node, parted, [k for k in kinds if k.part is None])
        return self._by_rule(node, given)

    def _is_inner(self, node: fx.Node) -> bool:
        user = next(iter(node.users), None)
        return len(node.users) == 1 and user is not None and user.target is aten.add.Tensor and node in spine_of(user)

    def _all_parts(self, node: fx.Node, parted: list[Kind], others: list[Kind]) -> Kind:
        enough = self._goes_on(node, parted, self.captures.others.get(node))
        linear = all(k.name in (UNIT, SHARE) for k in parted) and all(k.name in (SHARE, WHOLE) for k in others)
        if not (parted and enough and linear and are_complete(parted)):
            self.apart.append(node)
            return unknown
        self.kinds.update((inner, shared) for inner in spine_of(node))
        return shared

    def _goes_on(self, node: fx.Node, parted: list[Kind], other: fx.Node | None) -> bool:
        """Whether the second graph has as many more terms as it has sequences, of sequences alike."""
        units = [k for k in parted if k.name == UNIT]
        if not units:
            return True
        if other is None or self.captures.more.get(node, 0) != len(units) * (self.captures.times - 1):
            return False
        joined = pieces_of(other) if other.target is aten.cat.default else terms_of(other)
        return self._parts.go_on_alike(joined, len({k.like for k in units}))

    def _linear(self, given: Sequence[Kind]) -> Kind:
        moving = [k for k in given if k.name != WHOLE]
        if len({(k.name, k.part) for k in moving}) > 1:
            return unknown
        means = any(k.order == MEANS for k in moving)
        return replace(moving[0], order=MEANS if means else None, like=0)

    def _cat(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        pieces: Any = node.args[0]
        kinds = [self._given(node, n) for n in pieces]
        dim = int(node.args[1]) % node.meta["val"].dim() if len(node.args) > 1 else 0  # pyright: ignore
        parts = {k.part for k in kinds}
        if len(parts) > 1 or (node in self.captures.more and None not in parts):
            return self._all_pieces(node, kinds, dim)
        if all(k.name == ROWS and k.dim == dim for k in kinds):
            sizes = tuple(Fraction(n.meta["val"].shape[dim], pieces[0].meta["val"].shape[dim]) for n in pieces)
            alike = len({(k.part, k.order) for k in kinds}) == 1
            return Kind(ROWS, dim, kinds[0].part, ("cat", sizes, kinds[0].order)) if alike else unknown
        return self._by_rule(node, given)

    def _all_pieces(self, node: fx.Node, kinds: list[Kind], dim: int) -> Kind:
        starts = [k.part.start for k in kinds if k.part is not None]
        ordered = len(starts) == len(kinds) and starts == sorted(starts)
        one_way = len({(k.name, k.dim, k.order, k.like) for k in kinds}) == 1
        if ordered and one_way and are_complete(kinds):
            name = kinds[0].name
            if name == UNIT and self._goes_on(node, kinds, self.captures.others.get(node)):
                return Kind(ROWS, dim)
            if name == ROWS and kinds[0].dim == dim and kinds[0].order is None:
                return Kind(ROWS, dim)
            if name == SHARE:
                return Kind(LOOSE, dim)
        self.apart.append(node)
        return unknown
