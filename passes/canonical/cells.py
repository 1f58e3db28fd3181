"""One step of a recurrent layer becomes its products, gates and state, so that tp shards the features of the state.

    lstm_cell    taken, kept, new, shown = x Wi + h Wh + b        c' = s(kept) c + s(taken) tanh(new)
                                                                  h' = s(shown) tanh(c')
    gru_cell     reset, kept, new: of x Wi + bi and of h Wh + bh; the new one is tanh(of x + s(reset) of h)
                                                                  h' = new + s(kept) (h - new)
    rnn_cell     h' = tanh or relu of x Wi + h Wh + b

s is the sigmoid.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from passes.canonical.emit import Emit, Rewrite, applied, table
from passes.program.ops.aten import aten, named, shape_of


def _sides(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any], state: fx.Node) -> list[fx.Node]:
    """x Wᵢᵀ + bᵢ and h Wₕᵀ + bₕ, [b, gates · h]."""
    given = named(node, args, kwargs)
    sides = []
    for read, weight, bias in ((given["input"], "w_ih", "b_ih"), (state, "w_hh", "b_hh")):
        product = applied(emit, aten.linear.default, read, given[weight])
        sides.append(product if given[bias] is None else applied(emit, aten.add.Tensor, product, given[bias]))
    return sides


def _gates(emit: Emit, x: fx.Node, num: int) -> list[fx.Node]:
    last = len(shape_of(x)) - 1
    pieces = applied(emit, aten.split_with_sizes.default, x, [shape_of(x)[last] // num] * num, last)
    return [emit(operator.getitem, (pieces, i), {}, pieces.meta["val"][i]) for i in range(num)]


def _lstm_cell(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    hidden, cell = args[1]
    both = applied(emit, aten.add.Tensor, *_sides(emit, node, args, kwargs, hidden))
    taken, kept, new, shown = _gates(emit, both, 4)
    taken, kept, shown = (applied(emit, aten.sigmoid.default, gate) for gate in (taken, kept, shown))
    added = applied(emit, aten.mul.Tensor, taken, applied(emit, aten.tanh.default, new))
    cell = applied(emit, aten.add.Tensor, applied(emit, aten.mul.Tensor, kept, cell), added)
    return applied(emit, aten.mul.Tensor, shown, applied(emit, aten.tanh.default, cell)), cell


def _gru_cell(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    hidden = args[1]
    of_x, of_hidden = (_gates(emit, side, 3) for side in _sides(emit, node, args, kwargs, hidden))
    reset, kept = (
        applied(emit, aten.sigmoid.default, applied(emit, aten.add.Tensor, a, b))
        for a, b in zip(of_x[:2], of_hidden[:2], strict=True)
    )
    past = applied(emit, aten.mul.Tensor, reset, of_hidden[2])
    new = applied(emit, aten.tanh.default, applied(emit, aten.add.Tensor, of_x[2], past))
    change = applied(emit, aten.mul.Tensor, kept, applied(emit, aten.sub.Tensor, hidden, new))
    return applied(emit, aten.add.Tensor, new, change)


def _plain_cell(act: Any) -> Callable[..., Any]:
    def rewrite(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        both = applied(emit, aten.add.Tensor, *_sides(emit, node, args, kwargs, args[1]))
        return applied(emit, act, both)

    return rewrite


CELLS: dict[Any, Rewrite] = table(
    {
        _lstm_cell: "lstm_cell",
        _gru_cell: "gru_cell",
        _plain_cell(aten.tanh.default): "rnn_tanh_cell",
        _plain_cell(aten.relu.default): "rnn_relu_cell",
    }
)
