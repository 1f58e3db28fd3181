"""Ops that act on each row alone: what they make of a row does not depend on which others are there.

linear, matmul with weights, pointwise ops, norms and reductions over the other dims, views that keep the rows apart.
``rows`` is where the rows stand in each operand that has some; sizes may be symbols, a row's dim is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from planner.graph.ops.aten import aten, named, packet_of

Rows = Mapping[fx.Node, int]


def acts_on_each_row(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """``out``: where the rows stand in what the call makes; None if it is no tensor or has none."""
    test = _TESTS.get(packet_of(call.target))
    return test is not None and test(call, rows, out)


def _rank(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def _pointwise(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """All broadcast to one shape, in which all rows stand at one place, and nothing else has a size there."""
    if out is None:
        return False
    from_last = _rank(call) - out
    for node in call.all_input_nodes:
        if node in rows:
            if _rank(node) - rows[node] != from_last:
                return False
        elif _rank(node) >= from_last and node.meta["val"].shape[_rank(node) - from_last] != 1:
            return False
    return True


def _along(*names: str) -> Callable[[fx.Node, Rows, int | None], bool]:
    """Ops along dims that are named: not along the rows."""

    def test(call: fx.Node, rows: Rows, out: int | None) -> bool:
        given = named(call)
        dims = next((given[name] for name in names if given.get(name) is not None), None)
        if dims is None or dims == []:
            return False
        along = dims if isinstance(dims, (list, tuple)) else [dims]
        read = [n for n in call.all_input_nodes if n in rows]
        return set(read) == set(call.all_input_nodes) and all(int(d) % _rank(n) != rows[n] for n in read for d in along)

    return test


def _norm(call: fx.Node, rows: Rows, out: int | None) -> bool:
    x = call.all_input_nodes[0]
    last = named(call)["normalized_shape"]
    return x in rows and len(rows) == 1 and rows[x] < _rank(x) - len(last)


def _linear(call: fx.Node, rows: Rows, out: int | None) -> bool:
    x: Any = call.args[0]
    return set(rows) == {x} and rows[x] < _rank(x) - 1


def _product(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """mm, bmm, matmul: rows of the first are rows of the result; or both have them among the batch dims."""
    a: Any = call.args[-2] if packet_of(call.target) in (aten.addmm, aten.baddbmm) else call.args[0]
    b: Any = call.args[-1] if packet_of(call.target) in (aten.addmm, aten.baddbmm) else call.args[1]
    if packet_of(call.target) in (aten.addmm, aten.baddbmm) and not _is_flat(call.args[0], rows):
        return False
    if a in rows and b in rows:
        batch = _rank(a) > 2 and _rank(a) == _rank(b) and rows[a] == rows[b] < _rank(a) - 2
        return a is not b and batch
    if a in rows and rows[a] == _rank(a) - 2 and _rank(b) in (1, 2, _rank(a)):
        return all(n == 1 for n in list(b.meta["val"].shape)[:-2]) or rows[a] == out
    if a in rows and rows[a] < _rank(a) - 2:
        return _rank(b) <= 2 or (_rank(b) == _rank(a) and b.meta["val"].shape[rows[a]] == 1)
    return False


def _is_flat(bias: Any, rows: Rows) -> bool:
    return isinstance(bias, fx.Node) and bias not in rows and _rank(bias) == 1


def _einsum(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """One label is that of the rows, wherever they are read, and in the result."""
    text, operands = str(call.args[0]).replace(" ", ""), call.args[1]
    if "->" not in text or "." in text or not isinstance(operands, (list, tuple)):
        return False
    left, right = text.split("->")
    words = dict(zip(operands, left.split(","), strict=True))
    labels = {words[n][rows[n]] for n in rows}
    others = "".join(word for n, word in words.items() if n not in rows)
    if len(labels) != 1 or len(words) != len(operands):
        return False
    label = labels.pop()
    return label in right and label not in others and all(word.count(label) <= 1 for word in words.values())


def _always(call: fx.Node, rows: Rows, out: int | None) -> bool:
    return True


def _reshape(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """The rows are neither merged nor cut: as much stands before them, and as much behind."""
    x = call.all_input_nodes[0]
    if x not in rows or out is None:
        return False
    before, after = list(x.meta["val"].shape), list(call.meta["val"].shape)
    return _size(before[: rows[x]]) == _size(after[:out]) and _size(before[rows[x] + 1 :]) == _size(after[out + 1 :])


def _size(sizes: Sequence[Any]) -> int:
    return prod(int(n) for n in sizes) if all(isinstance(n, int) for n in sizes) else -1


def _stack(call: fx.Node, rows: Rows, out: int | None) -> bool:
    return set(call.all_input_nodes) == set(rows)


def _embedding(call: fx.Node, rows: Rows, out: int | None) -> bool:
    return set(rows) == {named(call)["indices"]}


def _gather(call: fx.Node, rows: Rows, out: int | None) -> bool:
    given = named(call)
    x, index = given["self"], given["index"]
    same = x in rows and index in rows and rows[x] == rows[index]
    return same and int(given["dim"]) % _rank(x) != rows[x]


def _packets(names: str) -> list[Any]:
    return [getattr(aten, name) for name in names.split() if hasattr(aten, name)]


POINTWISE = _packets(
    "add sub rsub mul neg abs to _to_copy contiguous clone detach alias dropout masked_fill where relu gelu silu relu6 "
    "softplus sigmoid tanh hardtanh hardsigmoid hardswish leaky_relu elu selu celu mish log_sigmoid clamp clamp_min "
    "clamp_max clip minimum maximum eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and "
    "bitwise_or bitwise_not __and__ __or__ square sin cos erf erfc atan sign sgn round floor ceil trunc zeros_like "
    "ones_like full_like empty_like type_as isnan isinf isfinite lerp addcmul threshold multiply subtract zero fill "
    "new_zeros new_ones new_empty new_full lift_fresh_copy"
)
# may give no number, or have no derivative, somewhere: a row that is not selected is kept away from there
SINGULAR = _packets(
    "div divide true_divide reciprocal log log2 log10 log1p sqrt rsqrt pow exp exp2 expm1 sinh cosh tan"
)
_TESTS: dict[Any, Callable[[fx.Node, Rows, int | None], bool]] = (
    dict.fromkeys([*POINTWISE, *SINGULAR], _pointwise)
    | dict.fromkeys(
        _packets(
            "softmax _softmax log_softmax _log_softmax sum mean amax amin var std var_mean cumsum cumprod topk sort "
            "argsort max min argmax argmin logsumexp prod any all glu linalg_vector_norm norm flip slice select split "
            "split_with_sizes chunk unbind narrow cat concat concatenate median count_nonzero"
        ),
        _along("dim", "dims", "axis"),
    )
    | dict.fromkeys(_packets("layer_norm rms_norm native_layer_norm"), _norm)
    | dict.fromkeys(_packets("mm bmm matmul addmm baddbmm"), _product)
    | dict.fromkeys(_packets("view reshape _unsafe_view flatten unflatten"), _reshape)
    | dict.fromkeys(
        _packets("unsqueeze squeeze permute transpose t movedim swapaxes mT expand expand_as view_as"), _always
    )
    | dict.fromkeys(_packets("zeros ones full empty"), _always)
    | {
        aten.linear: _linear,
        aten.einsum: _einsum,
        aten.stack: _stack,
        aten.embedding: _embedding,
        aten.gather: _gather,
    }
)
