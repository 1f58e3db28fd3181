"""The program of one rank of cp, written from the types of the full one.

    cut(x)        x of this rank: computed of parts; of a whole x taken as early as can be, from what it is made of
    whole(x)      x of all ranks: a cut one is gathered, partial sums are summed
    partial(x)    a whole x as partial sums: its share, x / cp

So of a mask [s, s] = i ≥ j a rank computes [s/cp, s], of its own i and of every j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from passes.partition.loss.loss_ops import MEAN, SUM
from passes.partition.options.base import Option, Site
from passes.partition.options.forms import Form
from passes.partition.sequence.builder import Builder, resized
from passes.partition.sequence.local_calls import local_arguments
from passes.partition.sequence.rules import options_over_cp
from passes.partition.sequence.types import Types, gathered_from
from passes.program.ops.aten import aten, is_random, named, packet_of, shape_of
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.ops.over_data import over_data
from passes.program.ops.sequence import causal_attention, sum_over_ranks
from passes.types.types import P, Placement, R


class LocalProgram:
    """Owns the written nodes of each value, in each type that a reader wants."""

    def __init__(self, source: fx.Graph, types: Types) -> None:
        self.types, self.cp, self.builder = types, types.cp, Builder(source, types.cp)
        self._made: dict[tuple[fx.Node, Placement], fx.Node] = {}
        for node in source.nodes:
            if node.op == "placeholder":
                self._made[node, R] = self.builder.copy(node, (), {})

    def write(self, source: fx.Graph, loss: fx.Node) -> fx.Graph:
        """The graph of one rank; its result is the rank's partial sum of the loss."""
        for node in source.nodes:
            if node in self.types.options:
                self.made(node, self.types.of(node))
        return self.builder.sorted_graph(self.made(loss, P))

    def made(self, node: fx.Node, wanted: Placement) -> fx.Node:
        wanted = R if wanted.kind == "I" else wanted
        key = node, wanted
        if key not in self._made:
            make = {"V": self._cut, "P": self._partial, "R": self._whole}[wanted.kind]
            self._made[key] = make(node, wanted)
        return self._made[key]

    # ---- a value in a type

    def _cut(self, node: fx.Node, wanted: Placement) -> fx.Node:
        if self.types.of(node) == wanted:
            return self._computed(node, self.types.options[node])
        assert self.types.of(node) == R, f"{node} is {self.types.of(node)}, not {wanted}"
        option = self._early(node, wanted)
        if option is not None:
            return self._computed(node, option)
        return self.builder.take(node, self.made(node, R), wanted)

    def _early(self, node: fx.Node, wanted: Placement) -> Option | None:
        """How a cut of a full value follows from cuts of its operands; None if it is computed in full and sliced."""
        if node.op != "call_function" or is_random(node):
            return None
        site = Site(node, 2 * self.cp, {node.name: {wanted}})
        for option in options_over_cp(site):
            if option.out == wanted and all(self._can(n, t) for n, t in zip(site.inputs, option.args, strict=True)):
                return option
        return None

    def _can(self, node: fx.Node, wanted: Placement) -> bool:
        have = self.types.of(node)
        return have == wanted if wanted.kind == "P" else have == R or (wanted.is_sharded and have == wanted)

    def _whole(self, node: fx.Node, _: Placement) -> fx.Node:
        have = self.types.of(node)
        if have == P:
            part = self.made(node, P)
            return self.builder.call(node, sum_over_ranks, part, self.cp, shape=shape_of(part))
        if have.is_sharded and gathered_from(node, self.types) is node:
            return self.builder.gather(node, self.made(node, have), have)
        wanted = P if node.target is over_data else R
        return self.builder.copy(node, *self._operands(node, lambda n: wanted))

    def _partial(self, node: fx.Node, _: Placement) -> fx.Node:
        if self.types.of(node) == P:
            return self._computed(node, self.types.options[node])
        whole = self.made(node, R)
        return self.builder.call(node, aten.mul.Tensor, whole, 1 / self.cp, shape=shape_of(whole))

    # ---- an op

    def _computed(self, node: fx.Node, option: Option) -> fx.Node:
        """The op on its operands in the types of ``option``."""
        wanted = dict(zip(node.all_input_nodes, option.args, strict=True))
        if node.target in CROSS_ENTROPIES and option.out == P and named(node)["reduction"] == MEAN:
            return self._mean_over_rows(node, option, wanted)
        if option.form is Form.PICKED:
            return self._picked(node, option)
        if _has_trained_bias(node):
            return self._by_hand(node, option, wanted)
        if (
            packet_of(node.target) in (aten.tril, aten.triu)
            and option.out.is_sharded
            and option.out.dim >= len(shape_of(node)) - 2
        ):
            return self._triangle(node, option)
        args, kwargs = self._operands(node, wanted.__getitem__, local_arguments(node, option, self.cp))
        if node.target is aten.scaled_dot_product_attention.default and named(node, args, kwargs)["is_causal"]:
            return self._causal(node, option, named(node, args, kwargs))
        made = self.builder.copy(node, args, kwargs, local_value(node, option, self.cp))
        if "draw" in node.meta and option.out.is_sharded:
            made.meta["draw"] = replace(node.meta["draw"], cut=option.out)
        if option.form is Form.MEAN:
            return self.builder.call(node, aten.mul.Tensor, made, 1 / self.cp, shape=shape_of(made))
        return made

    def _operands(
        self, node: fx.Node, wanted: Callable[[fx.Node], Placement], args: list[Any] | None = None
    ) -> tuple[Any, Any]:
        given = tuple(node.args if args is None else args)
        return fx.map_arg((given, dict(node.kwargs)), lambda n: self.made(n, wanted(n)))

    def _picked(self, node: fx.Node, option: Option) -> fx.Node:
        """The token on the rank that has it, zeros on all others."""
        x, dim, place, *_ = node.args
        assert isinstance(x, fx.Node)
        cut, build, rows = option.args[0], self.builder, self.made(x, option.args[0])
        wide = tuple(n if d == dim else 1 for d, n in enumerate(shape_of(x)))
        places = build.take(node, build.places(node, shape_of(x)[cut.dim]), cut.moved(0))
        is_it = build.call(node, aten.eq.Scalar, places, place, shape=shape_of(places))
        local = cut.local_shape(wide, self.cp)
        is_it = build.call(node, aten.reshape.default, is_it, list(local), shape=local)
        token = build.call(node, aten.where.ScalarOther, is_it, rows, 0, shape=shape_of(rows), of=rows)
        return build.call(node, aten.sum.dim_IntList, token, [dim], True, shape=shape_of(node))

    def _by_hand(self, node: fx.Node, option: Option, wanted: dict[fx.Node, Placement]) -> fx.Node:
        """softmax(q kᵀ · scale + bias) v: products that need not save gathered operands."""
        given, build = named(node), self.builder
        operands = (given[name] for name in ("query", "key", "value", "attn_mask"))
        q, k, v, bias = (self.made(n, wanted[n]) for n in operands)
        turned = (*shape_of(k)[:2], shape_of(k)[3], shape_of(k)[2])
        shape = (*shape_of(q)[:3], shape_of(k)[2])
        scale = shape_of(q)[-1] ** -0.5 if given["scale"] is None else given["scale"]
        turned_k = build.call(node, aten.permute.default, k, [0, 1, 3, 2], shape=turned)
        scores = build.call(node, aten.matmul.default, q, turned_k, shape=shape)
        scores = build.call(node, aten.mul.Tensor, scores, scale, shape=shape)
        scores = build.call(node, aten.add.Tensor, scores, bias, shape=shape)
        shares = build.call(node, aten.softmax.int, scores, -1, shape=shape)
        return build.call(node, aten.matmul.default, shares, v, shape=option.out.local_shape(shape_of(node), self.cp))

    def _triangle(self, node: fx.Node, option: Option) -> fx.Node:
        """The places of rows and columns decide which elements stay; one of the two is this rank's."""
        x, cut, build, like = node.all_input_nodes[0], option.out, self.builder, node
        part = self.made(x, cut)
        rows, columns = (
            self._places_along(node, dim, cut) for dim in (len(shape_of(node)) - 2, len(shape_of(node)) - 1)
        )
        square = (shape_of(rows)[0], shape_of(columns)[1])
        apart = build.call(like, aten.sub.Tensor, columns, rows, shape=square)
        compare = aten.le.Scalar if packet_of(node.target) is aten.tril else aten.ge.Scalar
        stays = build.call(like, compare, apart, named(node)["diagonal"], shape=square)
        stays.meta["val"] = resized(torch.empty((), dtype=torch.bool), square)
        nothing = False if part.meta["val"].dtype == torch.bool else 0
        return build.call(like, aten.where.ScalarOther, stays, part, nothing, shape=shape_of(part), of=part)

    def _places_along(self, node: fx.Node, dim: int, cut: Placement) -> fx.Node:
        """[s, 1] for rows, [1, s] for columns: places in the full sequence of a rank's part."""
        found = self.builder.places(node, shape_of(node)[dim])
        if dim == cut.dim:
            found = self.builder.take(node, found, cut.moved(0))
        size = shape_of(found)[0]
        shape = (size, 1) if dim == len(shape_of(node)) - 2 else (1, size)
        return self.builder.call(node, aten.reshape.default, found, list(shape), shape=shape)

    def _causal(self, node: fx.Node, option: Option, given: dict[str, Any]) -> fx.Node:
        """No matrix of a mask: which keys stand before a query, its chunk says."""
        operands = [self._with_heads(node, given[name]) for name in ("query", "key", "value")]
        options = {k: given[k] for k in ("dropout_p", "scale", "enable_gqa") if given.get(k)}
        made = self.builder.copy(node, (*operands, self.cp), options, local_value(node, option, self.cp))
        made.target, shape = causal_attention, shape_of(made)
        if len(shape) == 4:
            return made
        made.meta["val"] = resized(made.meta["val"], (*shape_of(operands[0])[:3], shape[-1]))
        return self.builder.call(node, aten.reshape.default, made, list(shape), shape=shape)

    def _with_heads(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """[.., s, d] as [b, h, s, d]."""
        *outer, size, width = shape_of(x)
        if len(outer) == 2:
            return x
        shape = (prod(outer[:-1]), *outer[-1:], size, width) if outer else (1, 1, size, width)
        return self.builder.call(node, aten.reshape.default, x, list(shape), shape=shape)

    def _mean_over_rows(self, node: fx.Node, option: Option, wanted: dict[fx.Node, Placement]) -> fx.Node:
        """A rank's sum, over the number of all rows that count: as many as the full target has."""
        given = named(node)
        names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
        args, kwargs = self._operands(node, wanted.__getitem__, [{**given, "reduction": SUM}[n] for n in names])
        total = self.builder.copy(node, args, {k: v for k, v in kwargs.items() if k not in names})
        target = self.made(given["target"], R)
        like, shape = given["target"], shape_of(target)
        valid = self.builder.call(like, aten.ne.Scalar, target, given["ignore_index"], shape=shape)
        if given["weight"] is not None:
            safe = self.builder.call(like, aten.mul.Tensor, target, valid, shape=shape)
            valid = self.builder.call(like, aten.mul.Tensor, self._weight_of(given["weight"], safe), valid, shape=shape)
        count = self.builder.call(node, aten.sum.default, valid, shape=())
        count.meta["grad"] = False
        return self.builder.call(node, aten.div.Tensor, total, count, shape=())

    def _weight_of(self, weight: fx.Node, target: fx.Node) -> fx.Node:
        return self.builder.call(weight, aten.index.Tensor, self.made(weight, R), [target], shape=shape_of(target))


def _has_trained_bias(node: fx.Node) -> bool:
    """Attention with equally many key heads, no dropout, and a bias with a gradient: its scores are saved anyway."""
    if node.target is not aten.scaled_dot_product_attention.default or is_random(node) or len(node.args) < 4:
        return False
    bias, shapes = node.args[3], [shape_of(n) for n in node.args[:3] if isinstance(n, fx.Node)]
    is_plain = len(shapes[0]) == 4 and len({shape[:2] for shape in shapes}) == 1
    return is_plain and isinstance(bias, fx.Node) and bool(bias.meta["grad"])


def local_value(node: fx.Node, option: Option, cp: int) -> Any:
    """The meta value of a rank's part; for a tuple, of each value along the sharded dim."""
    value, cut = node.meta["val"], option.out
    if isinstance(value, torch.Tensor):
        return resized(value, cut.local_shape(tuple(value.shape), cp)) if cut.is_sharded else None
    if not cut.is_sharded:
        return None
    sizes = [cut.local_size(cp)] * len(value)
    if option.form is Form.SPLIT and node.args[2] == cut.dim:
        sizes = local_arguments(node, option, cp)[1]
    found = []
    for size, tensor in zip(sizes, value, strict=True):
        shape = tuple(size if d == cut.dim else n for d, n in enumerate(tensor.shape))
        found.append(resized(tensor, shape))
    return type(value)(found)
