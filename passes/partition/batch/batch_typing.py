"""The kind of every value (passes.partition.loss.kinds), from two captures of different batch sizes.

    of a batch tensor, row by row                  ROWS        rows[i], or split and chunk along the batch  → of a part
    sum, mean over the batch; cross-entropy        SHARE       of one sequence alone, by any op             → UNIT
    ones @ rows, Σ_i f(row_i), cat of SHAREs       SHARE       cat, stack of UNITs, in order                → ROWS
    a small SHARE of batch tensors alone           WHOLE       (a count: of the global batch, known before the forward)

Ops are trusted to keep rows apart if exactly one dim of their result grows with the batch and they are none of those
that could mix it (passes.partition.batch.mixing). Before the loss, an op that mixes sequences is reported, and its
result counts as rows.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from passes.partition.batch.align_exports import TwoCaptures
from passes.partition.batch.mixing import mixes
from passes.partition.loss.counts import MOST_SUMS, input_only, places_rows
from passes.partition.loss.kinds import (
    LOOSE,
    MEAN,
    MEANS,
    NONE,
    PLACES,
    ROWS,
    SHARE,
    UNIT,
    UNKNOWN,
    WHOLE,
    BatchPart,
    Kind,
    adds_rows,
    are_complete,
    counts_inputs,
    dim_kept,
    is_mean,
    linear_in,
    reduces_rows,
    reduction_of,
    share,
    unknown,
    whole,
)
from passes.partition.loss.parts import UNITS, ByRule, Joins, Likeness, Parts
from passes.partition.loss.scaling import Scaling
from passes.program.ops.aten import arguments, aten, cut_of, is_random, shape_of, splits
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.program import Program


def _pieces(sizes: Sequence[Fraction]) -> list[BatchPart]:
    """Return the parts of pieces of these relative sizes in their concatenation."""
    ends = [sum(sizes[:i], Fraction(0)) / sum(sizes) for i in range(len(sizes) + 1)]
    return [BatchPart(a, b) for a, b in pairwise(ends)]


EVERYTHING = BatchPart(Fraction(0), Fraction(1))


class Typing:
    """Owns the kinds. ``counts``: nodes that are counts. ``single``: values of the one sequence that the batch is."""

    def __init__(
        self, program: Program, captures: TwoCaptures, scaling: Scaling, region: Collection[fx.Node], second: fx.Graph
    ) -> None:
        self.program, self.captures, self.scaling, self.region = program, captures, scaling, region
        self.kinds: dict[fx.Node, Kind] = {}
        self.counts: list[fx.Node] = []
        self.single: set[fx.Node] = set()
        self._parts = Parts(captures, program.graph.graph, second, scaling.second)
        self._likeness = Likeness(scaling.first)
        self.joins = Joins(self._parts, self.kinds, self._given, self._by_rule)
        self._of_ops: dict[Any, ByRule] = {
            aten.add.Tensor: self.joins.sum,
            aten.cat.default: self.joins.cat,
            aten.index.Tensor: self._index,
            aten.reshape.default: self._reshaped,
            aten.scatter_add.default: self._placed,
            aten.index_add.default: self._placed,
        }
        self._from_inputs = input_only(program)
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
        if self._is_count(node):
            self.counts.append(node)
            self.kinds[node] = replace(whole, like=like)

    def _is_count(self, node: fx.Node) -> bool:
        kind, val = self.kinds[node], node.meta.get("val")
        return (
            kind.name == SHARE
            and kind.part is None
            and isinstance(val, torch.Tensor)
            and 0 < val.numel() <= MOST_SUMS
            and bool(self._from_inputs.get(node.name))
            and not places_rows(node)
        )

    def _settled(self, node: fx.Node, kind: Kind) -> Kind:
        """Join a value that the second graph joins; before the loss, count one grown dim as rows."""
        join = self.captures.joins.get(node)
        if join is not None:
            sums, one = join.target is aten.add.Tensor, replace(kind, like=1)
            if kind.name == SHARE and are_complete([one]):
                return share if sums else Kind(LOOSE, int(join.args[1]))  # pyright: ignore[reportArgumentType]
            if kind.name != UNIT or not self.joins.goes_on(node, [kind], join):
                self.joins.apart.append(node)
                return unknown
            self.single.add(node)
            return share if sums else Kind(ROWS, int(join.args[1]))  # pyright: ignore[reportArgumentType]
        if kind.name == UNKNOWN and node not in self.region:
            changed = self.captures.changed(node)
            if changed is not None and len(changed) == 1:
                return Kind(ROWS, next(iter(changed)))
        return kind

    def takes_apart(self, node: fx.Node) -> bool:
        """Return whether a cut along the batch is one of several that cover all of it, or one of a value that was
        joined before."""
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
        if node.target in CROSS_ENTROPIES:
            return self._cross_entropy(node, given)
        return self._of_ops.get(node.target, self._by_rule)(node, given)

    def _by_rule(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        if any(k.name in (SHARE, LOOSE) for k in given):
            return self._of_shares(node)
        return self._over_rows(node, given) or self._joined(node, given)

    def _given(self, reader: fx.Node, node: fx.Node) -> Kind:
        kind = self.kinds[node]
        if (reader, node) in self.captures.spread and kind.name == WHOLE:
            return Kind(ROWS, self.captures.spread[reader, node])
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
        alike = node.target is aten.expand.default or is_random(node)
        return Kind(ROWS, next(iter(changed))) if alike and len(changed) == 1 else unknown

    def _cut(self, node: fx.Node, cut: tuple[fx.Node, int, int, int]) -> Kind:
        source, dim, start, stop = cut
        how, kind = self._parts.how(source, dim), self.kinds[source]
        other = cut_of(self.captures.others.get(node, node))
        if isinstance(kind.order, tuple) and kind.order[0] == "cat" and other is not None:
            spans = [
                BatchPart(Fraction(a, n), Fraction(b, n)) for (x, d, a, b) in (cut, other) for n in [shape_of(x)[d]]
            ]
            is_piece = spans[0] == spans[1] and spans[0] in _pieces(kind.order[1])
            if is_piece:
                self._pieces.add(node)
            return Kind(ROWS, dim, kind.part, kind.order[2]) if is_piece else unknown
        if how is None or kind.part is not None or kind.order is not None:
            return unknown
        part = self._parts.of(source, dim, start, stop)
        return Kind(UNIT, part=part) if how == UNITS else Kind(ROWS, dim, part)

    def _joined(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Type any op: of one sequence alone, or on rows that it keeps apart."""
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
        if dim is None or mixes(node, lambda n: self._dims(node, n), self.captures.others.get(node)):
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
        return dim_kept(node, {n: k.dim for n in node.all_input_nodes if (k := self.kinds[n]).name == ROWS})

    # ---- ops of losses

    def _moving(self, node: fx.Node) -> dict[fx.Node, Kind]:
        """Return the operands that are not the same in every microbatch."""
        given = {n: self._given(node, n) for n in node.all_input_nodes}
        return {n: kind for n, kind in given.items() if kind.name != WHOLE}

    def _of_shares(self, node: fx.Node) -> Kind:
        """Return a share, if the op is linear in all that moves, and in nothing else but shares."""
        moving = self._moving(node)
        names = {k.name for k in moving.values()}
        together = linear_in(node, moving, numbers=names == {SHARE})
        if not together or len(names) > 1:
            return unknown
        kind = self.joins.linear([self._given(node, n) for n in together])
        if kind.name != SHARE:
            return self._of_loose(node, kind, moving)
        return unknown if kind.part is None and self.captures.changed(node) else kind

    def _of_loose(self, node: fx.Node, kind: Kind, moving: Mapping[fx.Node, Kind]) -> Kind:
        """Type a sum of a LOOSE value. Nothing else stands along the dim to be summed: it would weight the summands."""
        dims = {n: k.dim for n, k in moving.items()}
        if kind.name != LOOSE or any(n.meta["val"].dim() for n in node.all_input_nodes if n not in dims):
            return unknown
        if adds_rows(node, dims):
            return self._added(node, kind)
        dim = dim_kept(node, dims)
        return unknown if dim is None else replace(kind, dim=dim)

    def _added(self, node: fx.Node, kind: Kind) -> Kind:
        means = (is_mean(node) or kind.order == MEANS) and kind.part is not None
        return Kind(SHARE, part=kind.part, order=MEANS if means else None)

    def _over_rows(self, node: fx.Node, given: Sequence[Kind]) -> Kind | None:
        """Type rows that are added up or averaged, by a sum, a product or a loss."""
        moving = self._moving(node)
        first = next(iter(moving.values()))
        if any((k.name, k.part, k.order) != (ROWS, first.part, first.order) for k in moving.values()):
            return None
        dims = {n: k.dim for n, k in moving.items()}
        if reduction_of(node):
            is_sum = set(dims.values()) == {first.dim} and reduces_rows(node, first.dim)
        else:
            is_sum = adds_rows(node, dims)
        return self._added(node, first) if is_sum else None

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
        return share if kinds[0].part is None and counted else unknown

    def _index(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Type x[arange(n), last]: of each sequence its own element."""
        args: Any = node.args
        x, first = self._given(node, args[0]), args[1][0] if args[1] else None
        rest = [self._given(node, n) for n in args[1][1:] if n is not None]
        own = isinstance(first, fx.Node) and self._given(node, first).order == PLACES
        if x == Kind(ROWS, like=x.like) and own and all(k.name == WHOLE or k == Kind(ROWS, like=k.like) for k in rest):
            return Kind(ROWS) if self.captures.changed(node) == {0} else unknown
        return self._joined(node, given)

    def _placed(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Type rows added to places of zeros that are as many in every batch: counts of each class."""
        args: Any = node.args
        zeros, dim, *rows = args
        kinds, constants = [self._given(node, n) for n in rows], self.scaling.first
        start = constants.value(zeros) if zeros in constants.nodes and self._given(node, zeros).name == WHOLE else None
        along = all((k.name, k.dim, k.part) == (ROWS, 0, None) for k in kinds)
        return share if dim == 0 and along and start is not None and not start.any() else self._joined(node, given)

    def _reshaped(self, node: fx.Node, given: Sequence[Kind]) -> Kind:
        """Keep the batch a dim, or the outer part of one; else its rows are not in its order any more."""
        (kind,) = given
        if kind.name != ROWS:
            return self._by_rule(node, given)
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


def sums_rows(node: fx.Node, captures: TwoCaptures) -> bool:
    """Return whether a sum runs over the one dim of its operand that follows the batch: a total."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or is_mean(node):
        return False
    (source,) = node.all_input_nodes
    grown = captures.changed(source)
    return grown is not None and len(grown) == 1 and adds_rows(node, {source: next(iter(grown))})
