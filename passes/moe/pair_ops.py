"""Calls on values [tokens, experts, features..], made again on rows [n, features..] of pairs.

A pair is a token and an expert that it chose; of pairs that no token chose nothing is computed.

    einsum("bsd,edh->bseh", x, W)    →  grouped_mm(rows[n, d], W[e, d, h], here)
    y[E, t, h] + bias[E, 1, h]       →  rows[n, h] + bias[ids]
    y.split(w, -1), y.reshape(…)     →  the same on the dims that are left
"""

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Domain
from passes.moe.layers import Refusal
from passes.moe.opening import Exchange
from passes.moe.token_rows import Counts, Layout, Part, followed, sizes_of
from passes.program.builder import Builder, arguments_with
from passes.program.ops.aten import aten, is_pointwise, named, packet_of, position_of, shape_of
from passes.program.ops.groups import PRODUCTS, VIEWS
from passes.rules.rule import RESULT, OpRule, operands_of
from passes.rules.table import rule_of

FREE = (Counts.EXPERTS, Counts.CHOICES)
UNKNOWN = "the effect of this op on one token of one expert is unknown"


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The replacement of a value: rows [n, features..]; for a stack [experts, features..], from any order of dims."""

    node: fx.Node
    layout: Layout
    is_stack: bool = False


class PairOps:
    """Owns ``held``: the replacements of rewritten values. ``sizes``: how many of each are counted."""

    def __init__(self, rows: Exchange, refusal: Refusal) -> None:
        self.build, self.here, self.refusal, of = rows.build, rows.here, refusal, rows.routing
        self.num_rows = of.num_rows
        self.sizes = {Counts.TOKENS: of.num_tokens, Counts.EXPERTS: of.size, Counts.CHOICES: of.top_k}
        self.held: dict[fx.Node, HeldRows] = {}

    def again(self, node: fx.Node) -> HeldRows:
        """Make a call again; all its operands are held, or numbers."""
        if node.target in PRODUCTS:
            return self._product(node)
        rule, layout = self._followed(node)
        if is_pointwise(node.target) or packet_of(node.target) is aten.expand:
            return self._aligned(node, layout)
        given = [self.held[n] for n in node.all_input_nodes if n in self.held]
        is_all = len(given) == len(node.all_input_nodes)
        if not is_all or len({(h.is_stack, *map(h.layout.is_row, range(len(h.layout.axes)))) for h in given}) > 1:
            raise self.refusal(node, "it combines values of different tokens")
        made = self._on_rows(node, rule, given[0], layout)
        return HeldRows(made, layout, given[0].is_stack)

    # ---- shapes

    def row_shape(self, layout: Layout, shape: tuple[int, ...]) -> list[int]:
        return [self.num_rows, *layout.features(shape)]

    def shaped(self, node: fx.Node, shape: list[int], domain: Domain = ROWS) -> fx.Node:
        if list(shape_of(node)) == shape:
            return node
        return self.build.call(aten.reshape.default, node, shape, domain=domain)

    def sound(self, node: fx.Node, layout: Layout) -> Layout:
        """Return the layout, if it says of each element which token and which expert it is of."""
        counted = sizes_of(layout.parts)
        if not layout.is_pure:
            raise self.refusal(node, "tokens, experts and features have an unsupported layout")
        for counts, size in counted.items():
            if size != self.sizes[counts]:
                raise self.refusal(node, f"it mixes {counts}")
        if {Counts.EXPERTS, Counts.CHOICES} <= counted.keys():
            raise self.refusal(node, "it counts both experts and choices")
        return layout

    def fitted(self, held: HeldRows, out: Layout, shape: tuple[int, ...]) -> fx.Node:
        """Return the rows of a value, shaped to align with others in ``out``, dims from the last on."""
        node = self.of_pairs(held)
        ahead = len(out.axes) - len(held.layout.axes)
        sizes = list(shape_of(node)[1:])
        own = [0 if held.layout.is_row(d) else sizes.pop(0) for d in range(len(held.layout.axes))]
        kept = [own[d - ahead] or 1 for d in range(ahead, len(shape)) if not out.is_row(d)]
        leading = sum(not out.is_row(d) for d in range(ahead))
        return self.shaped(node, [self.num_rows, *[1] * leading, *kept])

    def of_pairs(self, held: HeldRows) -> fx.Node:
        """Return the stack's entry for each pair."""
        if not held.is_stack:
            return held.node
        ids = self.build.call(exchange.ids_of, self.here, self.num_rows, domain=ROWS)
        return self.build.call(aten.index.Tensor, held.node, [ids], domain=ROWS)

    # ---- calls

    def _followed(self, node: fx.Node) -> tuple[OpRule, Layout]:
        """Return the rule of a call, and the layout of its result."""
        rule = rule_of(node)
        if rule is None:
            raise self.refusal(node, UNKNOWN)
        given = {i: self.held[n].layout for i, n in enumerate(operands_of(node)) if n in self.held}
        free = () if any(part.counts in FREE for layout in given.values() for part in layout.parts) else FREE
        repeated = lambda size: next((counts for counts in free if size == self.sizes[counts]), Counts.FEATURES)  # noqa: E731
        layout = followed(rule, given, len(shape_of(node)), repeated)
        if layout is None:
            raise self.refusal(node, "the result of one token of one expert depends on others")
        return rule, self.sound(node, layout)

    def _aligned(self, node: fx.Node, layout: Layout) -> HeldRows:
        """Make a call by elements, or expand, again: operands are broadcast."""
        fitted = {n: self.fitted(self.held[n], layout, shape_of(node)) for n in node.all_input_nodes if n in self.held}
        args, kwargs = arguments_with(node, fitted)
        if packet_of(node.target) is aten.expand:
            args = (args[0], self.row_shape(layout, shape_of(node)))
            if list(shape_of(args[0])) == args[1]:
                return HeldRows(args[0], layout)
        return HeldRows(self.build.call(node.target, *args, **kwargs, domain=ROWS), layout)

    def _on_rows(self, node: fx.Node, rule: OpRule, held: HeldRows, out: Layout) -> fx.Node:
        """Make a call again on the dims that are left, where it names others."""
        args, kwargs = arguments_with(node, {n: h.node for n, h in self.held.items()})
        layout, same = held.layout, list(shape_of(held.node))
        if packet_of(node.target) is aten.reshape:
            args = (held.node, [same[0], *out.features(shape_of(node))])
        elif packet_of(node.target) is aten.permute:
            dims = [d % len(layout.axes) for d in named(node)["dims"]]
            args = (held.node, [0, *(layout.row_dim(d) for d in dims if not layout.is_row(d))])
            same = list(range(len(args[1])))
        elif node.target is not getitem and "normalized_shape" not in named(node):
            args, kwargs = self._along(node, rule, layout, args, kwargs)
        if node.target in VIEWS and args[1] == same:
            return held.node
        return self.build.call(node.target, *args, **kwargs, domain=STACK if held.is_stack else ROWS)

    def _along(
        self, node: fx.Node, rule: OpRule, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call that names all dims which it does not leave as they are."""
        old, ndim = named(node).get("dim"), len(layout.axes)
        dims = [d % ndim for d in (old if isinstance(old, list | tuple) else [old]) if d is not None]
        if {d for d in range(ndim) if not rule.is_alone(0, d)} != {*dims} or not dims:
            raise self.refusal(node, UNKNOWN)
        new, at = [layout.row_dim(d) for d in dims], position_of(node.target, "dim")
        dim = new if isinstance(old, list | tuple) else new[0]
        return ((*args[:at], dim, *args[at + 1 :]), kwargs) if at < len(args) else (args, kwargs | {"dim": dim})

    # ---- products

    def _product(self, node: fx.Node) -> HeldRows:
        rule, layout = self._followed(node)
        stacks = [i for i, held in enumerate(self.factors_of(node)) if held.is_stack]
        if not stacks:
            return HeldRows(self.multiplied(node, rule, layout), layout)
        if len(stacks) > 1:
            raise self.refusal(node, "two stacks of experts are multiplied with each other")
        made = self._grouped(node, rule, stacks[0])
        return HeldRows(self.shaped(made, self.row_shape(layout, shape_of(node))), layout)

    def factors_of(self, node: fx.Node) -> list[HeldRows]:
        """Return the operands of a product."""
        found = operands_of(node)
        if len(found) != 2 or any(n not in self.held for n in found):
            raise self.refusal(node, "a matrix product is not of an input of experts and their weights")
        return [self.held[n] for n in found]

    def _grouped(self, node: fx.Node, rule: OpRule, at: int) -> fx.Node:
        """Make one product for the rows of each expert, with its own matrix: the operand ``at``."""
        x, w = (self.factors_of(node)[i] for i in (1 - at, at))
        of_x, of_w = ([rule.sole(i, d) for d in h.layout.feature_dims] for i, h in ((1 - at, x), (at, w)))
        features = [f for f in of_w if f is not None]
        summed = [f for f in features if f.at(1 - at) is not None and f.at(RESULT) is None]
        made = [f for f in features if f.at(1 - at) is None and f.at(RESULT) is not None]
        if not (len(of_w) == 2 and len(summed) == len(made) == 1 and of_x == summed):
            raise self.refusal(node, "a product with experts' matrices has more than one dim of features on a side")
        rows = self.shaped(x.node, [self.num_rows, summed[0].size])
        stack = self.shaped(w.node, [shape_of(w.node)[0], *(f.size for f in features)], STACK)
        if features[0] == made[0]:
            stack = self.build.call(aten.permute.default, stack, [0, 2, 1], domain=STACK)
        val = torch.empty((self.num_rows, made[0].size), dtype=node.meta["val"].dtype, device="meta")
        return self.build.call(exchange.grouped_mm, rows, stack, self.here, val=val, domain=ROWS)

    def multiplied(self, node: fx.Node, rule: OpRule, layout: Layout) -> fx.Node:
        """Make a product of two values of pairs that sums over no feature: element by element."""
        kept, rows = [d for d in range(len(layout.axes)) if not layout.is_row(d)], []
        for i, held in enumerate(self.factors_of(node)):
            found = [rule.sole(i, d) for d in held.layout.feature_dims]
            own = [place.dim if f is not None and (place := f.at(RESULT)) is not None else -1 for f in found]
            if own != [d for d in kept if d in own]:
                raise self.refusal(node, "a product sums over features of the experts' results, or transposes them")
            sizes = [n if d in own else 1 for d, n in enumerate(shape_of(node)) if d in kept]
            rows.append(self.shaped(self.of_pairs(held), [self.num_rows, *sizes]))
        return self.build.call(aten.mul.Tensor, *rows, domain=ROWS)


def stack_of(build: Builder, node: fx.Node, dim: int) -> HeldRows:
    """Return a value made of stacks alone, with ``dim`` as its dim of experts."""
    shape = shape_of(node)
    parts = [(Part(Counts.EXPERTS if d == dim else Counts.FEATURES, n),) if n > 1 else () for d, n in enumerate(shape)]
    if dim:
        order = [dim, *(d for d in range(len(shape)) if d != dim)]
        node = build.call(aten.permute.default, node, order, domain=STACK)
    return HeldRows(node, Layout(tuple(parts)), is_stack=True)
