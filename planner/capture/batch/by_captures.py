"""The kind of every value of a captured graph (planner.capture.loss.kinds), from two captures of different batch sizes.

    of a batch tensor, row by row                  ROWS        rows[i], or split and chunk along the batch  → of a part
    sum, mean over the batch; cross-entropy        SHARE       of one sequence alone, by any op             → UNIT
    ones @ rows, Σ_i f(row_i), cat of SHAREs       SHARE       cat, stack of UNITs, in order                → ROWS
    a small SHARE of batch tensors alone           WHOLE       (a count: of the global batch, known before the forward)

Ops are trusted to keep rows apart if exactly one dim of their result grows with the batch and they are none of those
that could mix it (planner.capture.batch.mixing). Before the loss, an op that mixes sequences is reported, and its
result counts as rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from planner.capture.batch.mixing import mixes
from planner.capture.batch.two_captures import TwoCaptures, aten, cut_of, splits
from planner.capture.loss.counts import AVERAGES, MOST_SUMS, SUMS, input_only
from planner.capture.loss.joins import Joins
from planner.capture.loss.kinds import (
    LOOSE,
    MEANS,
    PLACES,
    ROWS,
    SHARE,
    UNIT,
    UNKNOWN,
    WHOLE,
    Kind,
    Part,
    are_complete,
    unknown,
    whole,
)
from planner.capture.loss.loss_ops import (
    ADDED,
    CHOICES,
    CROSS_ENTROPIES,
    DIVISIONS,
    LAYOUT,
    MEAN,
    NONE,
    OF_ROWS,
    OVER_ROWS,
    SCALED,
    contracts,
    counts_inputs,
    one_dim_kept,
    reduction_of,
    selects,
)
from planner.capture.loss.loss_ops import share as shared
from planner.capture.loss.parts import UNITS, Likeness, Parts
from planner.capture.loss.scaling import Scaling
from planner.graph.ops.aten import arguments, reduced_dims
from planner.graph.ops.products import PRODUCTS
from planner.graph.program import Program


def _size(node: fx.Node, dim: int) -> int:
    return node.meta["val"].shape[dim]


def _pieces(sizes: Sequence[Fraction]) -> list[Part]:
    """The parts of pieces of these relative sizes in their concatenation."""
    ends = [sum(sizes[:i], Fraction(0)) / sum(sizes) for i in range(len(sizes) + 1)]
    return [Part(a, b) for a, b in pairwise(ends)]


EVERYTHING = Part(Fraction(0), Fraction(1))


class Typing(Joins):
    """Owns the kinds. ``counts``: nodes that are counts. ``single``: values of the one sequence that the batch is."""

    def __init__(
        self, program: Program, captures: TwoCaptures, scaling: Scaling, region: Collection[fx.Node], second: fx.Graph
    ) -> None:
        self.program, self.captures, self.scaling, self.region = program, captures, scaling, region
        self.kinds: dict[fx.Node, Kind] = {}
        self.counts: list[fx.Node] = []
        self.apart: list[fx.Node] = []
        self.single: set[fx.Node] = set()
        self._parts, self._likeness = Parts(captures, program.graph.graph, second), Likeness()
        self._from_inputs = input_only(program)
        self._counted: set[fx.Node] = set()  # readers of counts
        self._pieces: set[fx.Node] = set()  # cuts that equal a concatenated piece
        for node in program.graph.graph.nodes:
            if node.op != "output":
                self._note(node)

    def _note(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        part_of = {n: n for n in inputs if (node, n) in self.captures.taken}
        kind = self._kind(node)
        cut = cut_of(node)
        if cut is not None and kind.part is not None and self.kinds[cut[0]].part is None:
            part_of = {node: cut[0]}
        like = self._likeness.note(node, part_of)
        self.kinds[node] = replace(self._settled(node, kind), like=like)
        if any(n in self._counted for n in inputs):
            self._counted.add(node)
        if self._is_count(node):
            self.counts.append(node)
            self._counted.add(node)
            self.kinds[node] = replace(whole, like=like)

    def _is_count(self, node: fx.Node) -> bool:
        kind, val = self.kinds[node], node.meta.get("val")
        return (
            kind.name == SHARE
            and kind.part is None
            and isinstance(val, torch.Tensor)
            and 0 < val.numel() <= MOST_SUMS
            and bool(self._from_inputs.get(node.name))
            and node not in self._counted
        )

    def _settled(self, node: fx.Node, kind: Kind) -> Kind:
        """A value that the second graph joins is joined; before the loss, one grown dim counts as rows."""
        join = self.captures.joins.get(node)
        if join is not None:
            sums, one = join.target is aten.add.Tensor, replace(kind, like=1)
            if kind.name == SHARE and are_complete([one]):
                return shared if sums else Kind(LOOSE, int(join.args[1]))  # pyright: ignore[reportArgumentType]
            if kind.name != UNIT or not self._goes_on(node, [kind], join):
                return unknown
            self.single.add(node)
            return shared if sums else Kind(ROWS, int(join.args[1]))  # pyright: ignore[reportArgumentType]
        if kind.name == UNKNOWN and node not in self.region:
            changed = self.captures.changed(node)
            if changed is not None and len(changed) == 1:
                return Kind(ROWS, next(iter(changed)))
        return kind

    def takes_apart(self, node: fx.Node) -> bool:
        """Whether a cut along the batch is one of several that cover all of it, or one of a value that was joined
        before.
        """
        if node in self._pieces or (splits(node) and all(user in self._pieces for user in node.users)):
            return True
        cut = next((c for c in map(cut_of, (node, *node.users)) if c is not None), None)
        return cut is not None and self._parts.how(cut[0], cut[1]) is not None

    # ---- one node

    def _kind(self, node: fx.Node) -> Kind:
        if node in self.scaling.first.nodes:
            read = any(user not in self.scaling.first.nodes for user in node.users)
            return self.scaling.constant(node) if read else unknown
        if node.op == "placeholder":
            return Kind(ROWS) if node.name in self.program.inputs else whole
        given = [self._given(node, n) for n in node.all_input_nodes]
        if all(k.name == WHOLE for k in given):
            return self._of_wholes(node)
        cut = cut_of(node)
        if cut is not None and self.kinds[cut[0]].name == ROWS and self.kinds[cut[0]].dim == cut[1]:
            return self._cut(node, cut)
        rule = self._RULES.get(node.target)
        return rule(self, node, given) if rule is not None else self._joined(node, given)

    def _given(self, reader: fx.Node, node: fx.Node) -> Kind:
        kind = self.kinds[node]
        if (reader, node) in self.captures.taken:
            return Kind(UNIT, part=EVERYTHING) if kind.name == ROWS and kind.part is None else unknown
        return kind

    def _of_wholes(self, node: fx.Node) -> Kind:
        changed = self.captures.changed(node)
        if changed is None:
            known = node in self.captures.others or node not in self.region
            return whole if known else unknown
        if not changed:
            return whole
        alike = node.target in (aten.expand.default, aten.repeat.default)
        return Kind(ROWS, next(iter(changed))) if alike and len(changed) == 1 else unknown

    def _cut(self, node: fx.Node, cut: tuple[fx.Node, int, int, int]) -> Kind:
        source, dim, start, stop = cut
        how, kind = self._parts.how(source, dim), self.kinds[source]
        other = cut_of(self.captures.others.get(node, node))
        if isinstance(kind.order, tuple) and kind.order[0] == "cat" and other is not None:
            spans = [Part(Fraction(a, n), Fraction(b, n)) for (x, d, a, b) in (cut, other) for n in [_size(x, d)]]
            is_piece = spans[0] == spans[1] and spans[0] in _pieces(kind.order[1])
            if is_piece:
                self._pieces.add(node)
            return Kind(ROWS, dim, kind.part, kind.order[2]) if is_piece else unknown
        if how is None or kind.part is not None or kind.order is not None:
            return unknown
        part = self._parts.of(source, dim, start, stop)
        return Kind(UNIT, part=part) if how == UNITS else Kind(ROWS, dim, part)

    def _joined(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Any op: of one sequence alone, or on rows that it keeps apart."""
        moving = [k for k in given if k.name != WHOLE]
        first = moving[0]
        if any((k.name, k.part, k.order) != (first.name, first.part, first.order) for k in moving):
            return unknown
        if first.name == UNIT:
            return Kind(UNIT, part=first.part)
        if first.name != ROWS:
            return unknown
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return first
        dim = self._row_dim(node, first)
        if dim is None or mixes(node, lambda n: self._dims(node, n)):
            return unknown
        return Kind(ROWS, dim, first.part, first.order)

    def _dims(self, reader: fx.Node, node: fx.Node) -> frozenset[int] | None:
        kind = self.kinds.get(node)
        if kind is None or node is reader:
            return self.captures.changed(node)
        return frozenset({kind.dim}) if kind.name == ROWS else frozenset()

    def _row_dim(self, node: fx.Node, kind: Kind) -> int | None:
        changed = self.captures.changed(node)
        if changed is not None and len(changed) == 1:
            return next(iter(changed))
        if kind.part is None or changed:
            return None
        # chunks may be equally long in both captures
        source = next(n for n in node.all_input_nodes if self.kinds[n].name == ROWS)
        return one_dim_kept(node, source, self.kinds[source].dim)

    # ---- ops of losses

    def _scale(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """a · b or a / b, if b is the same in every microbatch."""
        operands = [self._given(node, a) for a in node.args[:2] if isinstance(a, fx.Node)]
        linear = [k for k in operands if k.name in (SHARE, LOOSE)]
        if len(linear) == 1 and all(k.name == WHOLE for k in operands if k is not linear[0]):
            divided = node.target in DIVISIONS
            if divided and operands[0] is not linear[0]:
                return unknown
            moved = node.meta["val"].dim() - self._operand(node, linear[0]).meta["val"].dim()
            return replace(linear[0], dim=linear[0].dim + moved, like=0)
        return self._joined(node, given)

    def _operand(self, node: fx.Node, kind: Kind) -> fx.Node:
        return next(n for n in node.all_input_nodes if self._given(node, n) is kind)

    def _reduce(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        kind, done = given[0], reduced_dims(node)
        if node.target is aten.count_nonzero.default and kind.name != ROWS:
            return self._joined(node, given)
        if kind.name == SHARE:
            return replace(kind, like=0)
        if kind.name in (ROWS, LOOSE) and kind.dim in done:
            means = node.target in AVERAGES or kind.order == MEANS
            return Kind(SHARE, part=kind.part, order=MEANS if means and kind.part is not None else None)
        return self._joined(node, given)

    def _cross_entropy(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        named = arguments(node)
        logits, target, weight = named["self"], named["target"], named.get("weight")
        kinds = [self._given(node, n) for n in (logits, target)]
        known = weight is None or self.kinds[weight].name == WHOLE
        if any(k.name != ROWS for k in kinds) or reduction_of(node) == NONE or not known:
            return self._joined(node, given)
        if kinds[0] != replace(kinds[1], like=kinds[0].like) or kinds[0].dim != 0:
            return unknown
        if reduction_of(node) != MEAN:
            return Kind(SHARE, part=kinds[0].part)
        counted = target in self.scaling.first.nodes or counts_inputs(node, self._from_inputs)
        return shared if kinds[0].part is None and counted else unknown

    def _over_rows(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        moving = [k for k in given if k.name != WHOLE]
        first = moving[0]
        alike = all((k.name, k.dim, k.part, k.order) == (ROWS, first.dim, first.part, first.order) for k in moving)
        if reduction_of(node) == NONE or not alike or (node.target in OF_ROWS and first.dim != 0):
            return self._joined(node, given)
        means = reduction_of(node) == MEAN and first.part is not None
        return Kind(SHARE, part=first.part, order=MEANS if means else None)

    def _product(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        moving = [(n, self._given(node, n)) for n in node.all_input_nodes]
        moving = [(n, k) for n, k in moving if k.name != WHOLE]
        first = moving[0][1]
        if first.name in (SHARE, LOOSE):
            summed = first.name == SHARE or contracts(node, moving[0][0], first.dim)
            return Kind(SHARE, part=first.part, order=first.order) if summed and len(moving) == 1 else unknown
        if len(moving) > 1 and all(k.name == ROWS and contracts(node, n, k.dim) for n, k in moving):
            alike = len({(k.part, k.order) for _, k in moving}) == 1
            return Kind(SHARE, part=first.part) if alike else unknown
        return self._joined(node, given)

    def _index(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """x[arange(n), last]: of each sequence its own element."""
        args: Any = node.args
        x, first = self._given(node, args[0]), args[1][0] if args[1] else None
        rest = [self._given(node, n) for n in args[1][1:] if n is not None]
        own = isinstance(first, fx.Node) and self._given(node, first).order == PLACES
        if x == Kind(ROWS, like=x.like) and own and all(k.name == WHOLE or k == Kind(ROWS, like=k.like) for k in rest):
            return Kind(ROWS) if self.captures.changed(node) == {0} else unknown
        return self._joined(node, given)

    def _lay_out(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        kind = given[0]
        if kind.name == SHARE and not (kind.part is None and self.captures.changed(node)):
            return replace(kind, like=0)
        if kind.name == LOOSE and node.target not in (aten.reshape.default, aten.permute.default, aten.expand.default):
            return replace(kind, like=0) if cut_of(node) is None else unknown
        if kind.name == ROWS and node.target is aten.reshape.default:
            return self._reshaped(node, kind)
        return self._joined(node, given)

    def _reshaped(self, node: fx.Node, kind: Kind) -> Kind:
        """The batch stays a dim, or the outer part of one; else its rows are not in its order any more."""
        dim = self._row_dim(node, kind)
        if dim is None:
            return unknown
        before = math.prod(node.all_input_nodes[0].meta["val"].shape[: kind.dim])
        outer = math.prod(node.meta["val"].shape[:dim])
        if outer == before:
            return Kind(ROWS, dim, kind.part, kind.order)
        if isinstance(kind.order, tuple) and kind.order[0] == "merged" and outer == before * kind.order[1]:
            return Kind(ROWS, dim, kind.part, kind.order[2])
        merged = before % outer == 0 and node.meta["val"].shape[dim] % (before // outer) == 0
        return Kind(ROWS, dim, kind.part, ("merged", before // outer, kind.order)) if merged else unknown

    def _choose(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """where(c, a, b), masked_fill(a, c, 0): linear if c is the same in every microbatch."""
        values, condition = selects(node)
        kinds = [self._given(node, n) for n in values]
        if self._given(node, condition).name == WHOLE and any(k.name == SHARE for k in kinds):
            return self._linear(kinds) if all(k.name in (SHARE, WHOLE) for k in kinds) else unknown
        return self._joined(node, given)

    _RULES: ClassVar[dict[Any, Any]] = {
        **dict.fromkeys(ADDED, Joins._sum),
        **dict.fromkeys(SCALED, _scale),
        **dict.fromkeys(SUMS | AVERAGES, _reduce),
        **dict.fromkeys(CROSS_ENTROPIES, _cross_entropy),
        **dict.fromkeys(OVER_ROWS, _over_rows),
        **dict.fromkeys(PRODUCTS, _product),
        **dict.fromkeys(LAYOUT, _lay_out),
        **dict.fromkeys(CHOICES, _choose),
        aten.cat.default: Joins._cat,
        aten.index.Tensor: _index,
        operator.getitem: _lay_out,
    }
