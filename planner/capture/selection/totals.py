"""Sums, means and losses of selected rows: those of all rows with a mask.

    x[mask].sum()                        total = (x, or 0 outside of mask).sum()
    x[mask].mean()                       total / mask.sum()
    mse_loss(x[mask], y[mask])           the mean of mse_loss(x, y, reduction="none")
    cross_entropy(x[mask], y[mask])      cross_entropy(x, y, or ignore_index outside of mask)
    total / x[mask].shape[0]             total / mask.sum()

The count of a mask of inputs is known of each microbatch, so that a loss of several is divided by that of them all.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from passes.program.ops.aten import aten, is_random, named, packet_of, shape_of
from passes.program.ops.groups import CROSS_ENTROPIES, DIVISIONS
from planner.capture.selection.places import COUNT, Rows, Writer, row_dim
from planner.capture.selection.space import Space, is_integer, is_known

NONE, MEAN = 0, 1  # values of ``reduction``


class Totals:
    """Writes totals of selected rows. ``spaces``: of each number of selected rows."""

    def __init__(self, write: Writer, spaces: Mapping[sympy.Symbol, Space]) -> None:
        self._write, self._spaces = write, spaces

    def of(self, call: fx.Node, env: Mapping[Any, Any]) -> fx.Node | None:
        """Return the value of a ``call`` that sums selected rows, or divides by their number; None for other calls."""
        packet, given = packet_of(call.target), named(call)
        if packet in (aten.sum, aten.mean):
            return self._sum(call, given, env) if isinstance(env[given["self"]], Rows) else None
        if packet in DIVISIONS and packet is not aten.floor_divide:
            return self._divided(given, env)
        if given.get("reduction", NONE) == NONE or is_random(call):
            return None
        if call.target in CROSS_ENTROPIES and not given["target"].meta["val"].is_floating_point():
            return self._labelled(call, given, env)
        return self._loss(call, given, env)

    def _sum(self, call: fx.Node, given: Mapping[str, Any], env: Mapping[Any, Any]) -> fx.Node | None:
        x, rows = given["self"], env[given["self"]]
        ndim = len(shape_of(rows.node))
        dims = sorted({int(d) % ndim for d in given.get("dim") or range(ndim)}) if ndim else []
        if row_dim(x.meta["val"]) not in dims:
            return None
        kept = self._write.only_selected(rows.space, rows.node, row_dim(x.meta["val"]) or 0)
        options = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
        made = self._write.call(aten.sum.dim_IntList, kept, dims, bool(given.get("keepdim")), **options)
        return self._mean(made, rows, dims) if packet_of(call.target) is aten.mean else made

    def _mean(self, total: fx.Node, rows: Rows, dims: Sequence[int]) -> fx.Node:
        """Return ``total`` over ``dims`` of the selected rows, divided by their number of elements."""
        others = prod(shape_of(rows.node)[d] for d in dims) // rows.space.num
        return self._write.call(aten.div.Tensor, total, self._count(rows.space, others))

    def _count(self, space: Space, times: int) -> fx.Node:
        count = self._write.call(aten.sum.default, space.row_mask)
        return count if times == 1 else self._write.call(aten.mul.Tensor, count, times)

    def _divided(self, given: Mapping[str, Any], env: Mapping[Any, Any]) -> fx.Node | None:
        """Divide by a multiple of the number of selected rows."""
        total, number = given["self"], given["other"]
        if not (isinstance(number, fx.Node) and env[number] is COUNT and isinstance(env.get(total), fx.Node)):
            return None
        expression = number.meta["val"].node.expr
        for symbol in expression.free_symbols:
            times = expression / symbol
            if times.is_Integer:
                return self._write.call(aten.div.Tensor, env[total], self._count(self._spaces[symbol], int(times)))
        return None

    def _labelled(self, call: fx.Node, given: Mapping[str, Any], env: Mapping[Any, Any]) -> fx.Node | None:
        """Make a cross entropy of class ids ignore rows that are not selected."""
        space, target = _space_of(call, env), env[given["target"]]
        if space is None or not isinstance(target, Rows):
            return None
        mask = self._write.shaped(space.row_mask, [space.num] + [1] * (len(shape_of(target.node)) - 1))
        ids = self._write.call(aten.where.ScalarOther, mask, target.node, given["ignore_index"])
        return self._called(call, env, {"target": ids})

    def _loss(self, call: fx.Node, given: Mapping[str, Any], env: Mapping[Any, Any]) -> fx.Node | None:
        """Write out a loss that compares element by element, or row by row, before it is summed."""
        space = _space_of(call, env)
        if space is None or not is_known(call):
            return None
        rows = {name: env[n].node for name, n in given.items() if isinstance(n, fx.Node) and isinstance(env[n], Rows)}
        # an unselected row is 1, a class 0: each loss has a derivative there, of a probability or a distance
        numbers = [(name, x.meta["val"]) for name, x in rows.items() if x.meta["val"].dtype != torch.bool]
        kept = {name: 0 if is_integer(value) else 1 for name, value in numbers}
        rows |= {name: self._write.only_selected(space, rows[name], 0, other) for name, other in kept.items()}
        each = self._called(call, env, {**rows, "reduction": NONE})
        if shape_of(each)[:1] != (space.num,):
            return None
        dims = [*range(len(shape_of(each)))]
        total = self._write.call(aten.sum.dim_IntList, self._write.only_selected(space, each, 0), dims)
        return self._mean(total, Rows(space, each), dims) if given["reduction"] == MEAN else total

    def _called(self, call: fx.Node, env: Mapping[Any, Any], changed: Mapping[str, Any]) -> fx.Node:
        """Call on all rows, with ``changed`` arguments."""
        dense = {n: made.node if isinstance(made := env[n], Rows) else made for n in call.all_input_nodes}
        given = {**fx.map_arg(named(call), dense.__getitem__), **changed}  # pyright: ignore
        arguments = call.target._schema.arguments  # pyright: ignore
        by_name = {a.name: given[a.name] for a in arguments if a.kwarg_only}
        return self._write.call(call.target, *(given[a.name] for a in arguments if not a.kwarg_only), **by_name)


def _space_of(call: fx.Node, env: Mapping[Any, Any]) -> Space | None:
    """Return the one space of all operands with rows, along dim 0; None if there is none, or another operand."""
    made = [env[n] for n in call.all_input_nodes]
    rows = [x for x in made if isinstance(x, Rows)]
    if not rows or any(not isinstance(x, (Rows, fx.Node)) for x in made):
        return None
    space = rows[0].space
    return space if all(x.space is space and shape_of(x.node)[:1] == (space.num,) for x in rows) else None
