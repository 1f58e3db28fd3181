"""Calls on values [tokens, experts, features..], made again on rows [n, features..] of pairs.

A pair is a token and an expert that it chose; of pairs that no token chose nothing is computed.

    einsum("bsd,edh->bseh", x, W)    →  grouped_mm(rows[n, d], W[e, d, h], here)
    y[E, t, h] + bias[E, 1, h]       →  rows[n, h] + bias[ids]
    y.split(w, -1), y.reshape(…)     →  the same on the dims that are left
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PlanError
from planner.experts import exchange
from planner.experts.building import Builder
from planner.experts.domain import Domain
from planner.experts.layouts import Axis, Counts, Layout, Part, aligned
from planner.graph.ops.aten import aten, is_pointwise, named, ops_named, packet_of, reduced_dims, shape_of
from planner.graph.ops.groups import JOINS
from planner.graph.ops.products import PRODUCTS, equation

ROWS, STACK = Domain(rows=0), Domain(experts=0)
ALONG = set(ops_named("softmax.int _softmax log_softmax.int _log_softmax sum.dim_IntList mean.dim amax amin"))
ALONG |= set(ops_named("cumsum logsumexp any.dim argmax argmin topk sort"))
NORMS = {aten.layer_norm, aten.rms_norm}
PARTING = {aten.slice, aten.select, aten.split_with_sizes, aten.split, aten.unbind, aten.cat}
LIST = (aten.split_with_sizes, aten.split, aten.unbind)


@dataclass(frozen=True, slots=True)
class Held:
    """The replacement of a value: rows [n, features..]; for a stack [experts, features..], from any order of dims."""

    node: fx.Node
    layout: Layout
    is_stack: bool = False


class PairOps:
    """Owns ``held``: the replacements of rewritten values. ``sizes``: how many of each are counted."""

    def __init__(
        self,
        build: Builder,
        here: fx.Node,
        num_rows: int,
        sizes: Mapping[Counts, int],
        refusal: Callable[[fx.Node, str], PlanError],
    ) -> None:
        self.build, self.here, self.num_rows, self.sizes, self.refusal = build, here, num_rows, sizes, refusal
        self.held: dict[fx.Node, Held] = {}

    def again(self, node: fx.Node) -> Held:
        """Make a call again, all that it reads being held or a number."""
        packet = packet_of(node.target)
        given = [self.held[n] for n in node.all_input_nodes if n in self.held]
        if node.target in PRODUCTS:
            return self._product(node)
        if packet is aten.permute and given[0].is_stack:
            return self._permuted_stack(node, given[0])
        if any(h.is_stack for h in given) and not is_pointwise(node.target):
            raise self.refusal(node, "a stack of experts has an unsupported layout")
        if packet is aten.reshape:
            return self._reshaped(node, given[0])
        if packet is aten.permute:
            return self._permuted(node, given[0])
        if is_pointwise(node.target) or packet is aten.expand:
            return self._pointwise(node)
        if node.target is getitem or packet in PARTING or packet in JOINS or packet in NORMS or node.target in ALONG:
            return self._along(node, given)
        raise self.refusal(node, "the effect of this op on one token of one expert is unknown")

    # ---- shapes

    def row_shape(self, layout: Layout, shape: tuple[int, ...]) -> list[int]:
        return [self.num_rows, *layout.features(shape)]

    def shaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(shape_of(node)) == shape:
            return node
        return self.build.call(aten.reshape.default, node, shape, domain=ROWS)

    def sound(self, node: fx.Node, layout: Layout | None) -> Layout:
        """The layout, if it says of each element which token and which expert it is of."""
        if layout is None or not layout.is_pure:
            raise self.refusal(node, "tokens, experts and features have an unsupported layout")
        for counts, size in self.sizes.items():
            total = 1
            for part in (p for axis in layout.axes for p in axis if p.counts is counts):
                total *= part.size
            if total not in (1, size):
                raise self.refusal(node, f"it mixes {counts}")
        if {Counts.EXPERTS, Counts.CHOICES} <= layout.counted:
            raise self.refusal(node, "it counts both experts and choices")
        return layout

    def fitted(self, held: Held, out: Layout, shape: tuple[int, ...]) -> fx.Node:
        """Rows of a value, shaped to align with others in ``out``, dims from the last on."""
        node = self.of_pairs(held)
        ahead = len(out.axes) - len(held.layout.axes)
        sizes = list(shape_of(node)[1:])
        own = [0 if held.layout.is_row(d) else sizes.pop(0) for d in range(len(held.layout.axes))]
        kept = [own[d - ahead] or 1 for d in range(ahead, len(shape)) if not out.is_row(d)]
        leading = sum(not out.is_row(d) for d in range(ahead))
        return self.shaped(node, [self.num_rows, *[1] * leading, *kept])

    def of_pairs(self, held: Held) -> fx.Node:
        """The stack's entry for each pair."""
        if not held.is_stack:
            return held.node
        val = torch.empty(self.num_rows, dtype=torch.int64, device="meta")
        ids = self.build.call(exchange.ids_of, self.here, self.num_rows, val=val, domain=ROWS)
        return self.build.call(aten.index.Tensor, held.node, [ids], domain=ROWS)

    # ---- calls

    def _reshaped(self, node: fx.Node, held: Held) -> Held:
        layout = self.sound(node, held.layout.reshaped(shape_of(node)))
        return Held(self.shaped(held.node, self.row_shape(layout, shape_of(node))), layout)

    def _permuted(self, node: fx.Node, held: Held) -> Held:
        dims = [d % len(held.layout.axes) for d in named(node)["dims"]]
        rows = [0, *(held.layout.row_dim(d) for d in dims if not held.layout.is_row(d))]
        layout = held.layout.permuted(dims)
        if rows == list(range(len(rows))):
            return Held(held.node, layout)
        return Held(self.build.call(aten.permute.default, held.node, rows, domain=ROWS), layout)

    def _permuted_stack(self, node: fx.Node, held: Held) -> Held:
        """The experts stay first, for any dims of experts."""
        dims = [d % len(held.layout.axes) for d in named(node)["dims"]]
        order = [0, *(held.layout.row_dim(d) for d in dims if not held.layout.is_row(d))]
        made = self.build.call(aten.permute.default, held.node, order, domain=STACK)
        return Held(made, held.layout.permuted(dims), is_stack=True)

    def _pointwise(self, node: fx.Node) -> Held:
        shape = shape_of(node)
        layout = aligned((self.held[n].layout for n in node.all_input_nodes if n in self.held), len(shape))
        if layout is not None and packet_of(node.target) is aten.expand:
            layout = Layout(
                tuple(axis or self._repeated(layout, n) for axis, n in zip(layout.axes, shape, strict=True))
            )
        layout = self.sound(node, layout)
        fitted = {n: self.fitted(self.held[n], layout, shape) for n in node.all_input_nodes if n in self.held}
        args, kwargs = self._given(node, fitted)
        if packet_of(node.target) is aten.expand:
            args = (args[0], self.row_shape(layout, shape))
            if list(shape_of(args[0])) == args[1]:
                return Held(args[0], layout)
        return Held(self.build.call(node.target, *args, **kwargs, domain=ROWS), layout)

    def _repeated(self, layout: Layout, size: int) -> Axis:
        """The things counted by a dim over which a value is repeated."""
        if size == 1:
            return ()
        free = Counts.EXPERTS, Counts.CHOICES
        if not layout.counted & set(free):
            for counts in free:
                if size == self.sizes[counts]:
                    return (Part(counts, size),)
        return (Part(Counts.FEATURES, size),)

    @staticmethod
    def _given(node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: own.get(n, n))
        return tuple(args), dict(kwargs)

    def _along(self, node: fx.Node, given: list[Held]) -> Held:
        """Calls along dims of features, each named by a number or a list of them, or the last ones of a norm."""
        layout, packet = given[0].layout, packet_of(node.target)
        args, kwargs = self._given(node, {n: self.held[n].node for n in node.all_input_nodes if n in self.held})
        if len({h.layout.counted - {Counts.FEATURES} for h in given}) != 1:
            raise self.refusal(node, "it combines values of different tokens")
        if node.target is getitem:
            return Held(self.build.call(getitem, *args), self._resized(node, layout, shape_of(node)))
        if packet in NORMS:
            dims = range(len(layout.axes) - len(named(node)["normalized_shape"]), len(layout.axes))
        elif packet in PARTING:
            dims = [int(named(node).get("dim") or 0) % len(layout.axes)]
        else:
            dims = sorted(reduced_dims(node))
        if any(layout.is_row(d) for d in dims):
            raise self.refusal(node, "the result of one token of one expert depends on others")
        if packet not in NORMS:
            args, kwargs = _with_dims(node, args, kwargs, [layout.row_dim(d) for d in dims])
        made = self.build.call(node.target, *args, **kwargs, domain=ROWS)
        if packet in LIST:
            return Held(made, layout)
        gone = set(dims) if len(shape_of(node)) < len(layout.axes) else set()
        left = Layout(tuple(axis for d, axis in enumerate(layout.axes) if d not in gone))
        return Held(made, self._resized(node, left, shape_of(node)))

    def _resized(self, node: fx.Node, layout: Layout, shape: tuple[int, ...]) -> Layout:
        """The same dims, those of features as long as ``shape`` says."""
        if len(layout.axes) != len(shape):
            raise self.refusal(node, "its slices are taken in an unsupported way")
        axes = [
            axis if layout.is_row(d) else (Part(Counts.FEATURES, n),) if n > 1 else ()
            for d, (axis, n) in enumerate(zip(layout.axes, shape, strict=True))
        ]
        return self.sound(node, Layout(tuple(axes)))

    # ---- products

    def _product(self, node: fx.Node) -> Held:
        found = self.labelled(node)
        operands, words, out, axes = found
        gone = [c for c in dict.fromkeys("".join(words)) if c not in out]
        if any(p.counts is not Counts.FEATURES for c in gone for p in axes[c]):
            raise self.refusal(node, "it sums over tokens or experts")
        layout = self.sound(node, Layout(tuple(axes[c] for c in out)))
        stacks = [i for i, held in enumerate(operands) if held.is_stack]
        if not stacks:
            return Held(self.multiplied(node, operands, words, out, axes), layout)
        if len(stacks) > 1:
            raise self.refusal(node, "two stacks of experts are multiplied with each other")
        x, w = operands[1 - stacks[0]], operands[stacks[0]]
        made = self._grouped(node, x, w, words[1 - stacks[0]], words[stacks[0]], out, axes)
        return Held(self.shaped(made, self.row_shape(layout, shape_of(node))), layout)

    def labelled(self, node: fx.Node) -> tuple[list[Held], list[str], str, dict[str, Axis]]:
        """Its operands, their labels, those of the result, and the meaning of each label."""
        found = equation(node)
        if found is None or len(found[0]) != 2 or any(n not in self.held for n in found[0]):
            raise self.refusal(node, "a matrix product is not of an input of experts and their weights")
        operands, axes = [self.held[n] for n in found[0]], dict[str, Axis]()
        for held, word in zip(operands, found[1], strict=True):
            for label, axis in zip(word, held.layout.axes, strict=True):
                if axes.setdefault(label, axis) != axis:
                    raise self.refusal(node, "contracted dims of a product count different things")
        return operands, found[1], found[2], axes

    def _grouped(
        self, node: fx.Node, x: Held, w: Held, word_x: str, word_w: str, out: str, axes: Mapping[str, Axis]
    ) -> fx.Node:
        """One product for the rows of each expert, with its own matrix."""

        def of_features(word: str) -> list[str]:
            return [c for c in word if axes[c] and axes[c][0].counts is Counts.FEATURES]

        features = of_features(word_w)
        summed = [c for c in features if c in word_x and c not in out]
        made = [c for c in features if c not in word_x and c in out]
        if not (len(features) == 2 and len(summed) == len(made) == 1 and of_features(word_x) == summed):
            raise self.refusal(node, "a product with experts' matrices has more than one dim of features on a side")
        sizes = {c: p.size for c in features for p in axes[c]}
        rows = self.shaped(x.node, [self.num_rows, sizes[summed[0]]])
        stack = self._stack_of(w, [sizes[c] for c in features])
        if features[0] == made[0]:
            stack = self.build.call(aten.permute.default, stack, [0, 2, 1], domain=STACK)
        val = torch.empty((self.num_rows, sizes[made[0]]), dtype=node.meta["val"].dtype, device="meta")
        return self.build.call(exchange.grouped_mm, rows, stack, self.here, val=val, domain=ROWS)

    def _stack_of(self, w: Held, features: list[int]) -> fx.Node:
        """[experts, features..] without dims of size 1."""
        sizes = [shape_of(w.node)[0], *features]
        if list(shape_of(w.node)) == sizes:
            return w.node
        return self.build.call(aten.reshape.default, w.node, sizes, domain=STACK)

    def multiplied(
        self, node: fx.Node, operands: list[Held], words: list[str], out: str, axes: Mapping[str, Axis]
    ) -> fx.Node:
        """A product of two values of pairs that sums over no feature: element by element."""
        kept = [c for c in out if not (axes[c] and axes[c][0].counts is not Counts.FEATURES)]
        rows = []
        for held, word in zip(operands, words, strict=True):
            own = [c for c in word if axes[c] and axes[c][0].counts is Counts.FEATURES]
            if own != [c for c in kept if c in own]:
                raise self.refusal(node, "a product sums over features of the experts' results, or transposes them")
            sizes = [axes[c][0].size if c in own else 1 for c in kept]
            rows.append(self.shaped(self.of_pairs(held), [self.num_rows, *sizes]))
        return self.build.call(aten.mul.Tensor, *rows, domain=ROWS)


def stack_of(build: Builder, node: fx.Node, dim: int) -> Held:
    """A value made of stacks alone, with ``dim`` as its dim of experts."""
    shape = shape_of(node)
    parts = [(Part(Counts.EXPERTS if d == dim else Counts.FEATURES, n),) if n > 1 else () for d, n in enumerate(shape)]
    if dim:
        order = [dim, *(d for d in range(len(shape)) if d != dim)]
        node = build.call(aten.permute.default, node, order, domain=STACK)
    return Held(node, Layout(tuple(parts)), is_stack=True)


def _with_dims(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other dims, wherever they stand."""
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore
    at = names.index("dim")
    old = named(node)["dim"]
    new = dims if isinstance(old, list | tuple) or old is None else dims[0]
    if at < len(args):
        return (*args[:at], new, *args[at + 1 :]), kwargs
    return args, kwargs | {"dim": new}


def is_number(node: fx.Node) -> bool:
    """Whether a value is one number, the same for all."""
    val = node.meta["val"]
    return isinstance(val, Tensor) and val.numel() == 1 and not node.meta["grad"]
