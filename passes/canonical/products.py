"""Canonical forms of products and of losses.

einsum with "..." or without "->"    → explicit letters, two operands at a time
mv, dot, addmv, outer, bilinear      → matmul, einsum
convolution with bias                → the product, then an add
nll_loss(log_softmax(x), t)          → cross_entropy_loss(x, t)
−log_softmax(x).gather(−1, t)        → cross_entropy_loss(x, t), unreduced
"""

from string import ascii_letters
from typing import Any

import torch
from torch import fx

from passes.canonical.emit import Emit, Rewrite, applied, dim_of, reshaped, table, viewed
from passes.program.ops.aten import aten, named, shape_of
from passes.program.ops.groups import LOG_SOFTMAXES
from passes.rules.products import explicit

UNREDUCED = 0


def _einsum(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Drop broadcast dims of size 1 of an operand, so that a letter has one size. A letter that an operand has twice
    stands for a diagonal."""
    operands = list(args[1])
    text = explicit(args[0], [len(shape_of(x)) for x in operands])
    words, result = text.partition("->")[0].split(","), text.partition("->")[2]
    for i, word in enumerate(words):
        words[i], operands[i] = _of_diagonals(emit, word, operands[i])
    sizes: dict[str, int] = {}
    for word, x in zip(words, operands, strict=True):
        for letter, n in zip(word, shape_of(x), strict=True):
            sizes[letter] = max(n, sizes.get(letter, 1))
    for i, (word, x) in enumerate(zip(words, operands, strict=True)):
        kept = [n == sizes[c] for c, n in zip(word, shape_of(x), strict=True)]
        if not all(kept):
            words[i] = "".join(c for c, k in zip(word, kept, strict=True) if k)
            operands[i] = viewed(emit, x, [n for n, k in zip(shape_of(x), kept, strict=True) if k])
    path: list[int] = list(named(node, args, kwargs)["path"] or ())
    while len(words) > 2:
        pair, path = path[:2], path[2:]
        words, operands = _paired(emit, words, operands, result, pair)
    return emit(aten.einsum.default, (",".join(words) + "->" + result, operands), {}, node.meta["val"])


def _of_diagonals(emit: Emit, word: str, x: fx.Node) -> tuple[str, fx.Node]:
    """Take diagonals until each letter stands once."""
    while (twice := next((c for c in word if word.count(c) > 1), None)) is not None:
        first = word.index(twice)
        second = word.index(twice, first + 1)
        x = applied(emit, aten.diagonal.default, x, 0, first, second)
        word = "".join(c for i, c in enumerate(word) if i not in (first, second)) + twice
    return word, x


def _paired(
    emit: Emit, words: list[str], operands: list[Any], result: str, pair: list[int]
) -> tuple[list[str], list[Any]]:
    """Two operands multiplied, and summed over letters of no other: ``pair``, if opt_einsum has found an order, with
    the product behind the others then, as it counts; else the first two.
    """
    chosen = pair or [0, 1]
    rest = [i for i in range(len(words)) if i not in chosen]
    (a, b), others = (words[i] for i in chosen), [words[i] for i in rest]
    made = "".join(c for c in dict.fromkeys(a + b) if c in result + "".join(others))
    product = applied(emit, aten.einsum.default, f"{a},{b}->{made}", [operands[i] for i in chosen])
    left = [operands[i] for i in rest]
    return ([*others, made], [*left, product]) if pair else ([made, *others], [product, *left])


def _matmul(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return emit(aten.matmul.default, args[:2], {}, node.meta["val"])


def _outer(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return emit(aten.einsum.default, ("i,j->ij", list(args[:2])), {}, node.meta["val"])


def _bilinear(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, y, weight, *bias = args
    batch = ascii_letters[: len(shape_of(x)) - 1]
    product = emit(aten.einsum.default, (f"{batch}I,OIJ,{batch}J->{batch}O", [x, weight, y]), {}, node.meta["val"])
    bias = next((b for b in (*bias, kwargs.get("bias")) if b is not None), None)
    return product if bias is None else emit(aten.add.Tensor, (product, bias), {}, node.meta["val"])


def _convolution(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Add a bias [channels] after the product, as for a linear."""
    val = node.meta["val"]
    bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
    rest = [*args[:2], None, *args[3:]] if len(args) > 3 else args[:2]
    product = emit(node.target, rest, {k: v for k, v in kwargs.items() if k != "bias"}, val)
    if bias is None:
        return product
    spatial = len(shape_of(args[1])) - 2
    return emit(aten.add.Tensor, (product, viewed(emit, bias, [-1] + [1] * spatial)), {}, val)


def _histc(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Count integers as floats, which every device can count."""
    val = args[0].meta["val"]
    if val.is_floating_point():
        return emit(node.target, args, kwargs, node.meta["val"])
    wide = applied(emit, aten.to.dtype, args[0], torch.float32)
    counts = emit(node.target, [wide, *args[1:]], kwargs, node.meta["val"].to(torch.float32))
    return emit(aten.to.dtype, (counts, val.dtype), {}, node.meta["val"])


def _nll_loss(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite nll_loss of a log_softmax over the classes as the cross-entropy of the logits."""
    given = named(node, args, kwargs)
    logits = _before_log_softmax(emit, given["self"], 1 if len(shape_of(given["self"])) > 1 else 0)
    if logits is None or given["target"].meta["val"].is_floating_point():
        return emit(node.target, args, kwargs, node.meta["val"])
    reduced = [given[name] for name in ("target", "weight", "reduction", "ignore_index")]
    return loss_of_rows(emit, [logits, *reduced], {}, node.meta["val"])


def loss_of_rows(emit: Emit, args: list[Any], kwargs: dict[str, Any], val: Any) -> fx.Node:
    """Rewrite ``cross_entropy_loss`` of logits [classes] or [b, classes, d ..] as that of rows [tokens, classes]."""
    logits, target, *rest = args
    if (ndim := len(shape_of(logits))) > 2:
        logits = applied(emit, aten.permute.default, logits, [0, *range(2, ndim), 1])
    if ndim != 2:
        logits, target = viewed(emit, logits, [-1, shape_of(logits)[-1]]), viewed(emit, target, [-1])
    return reshaped(emit, applied(emit, aten.cross_entropy_loss.default, logits, target, *rest, **kwargs), val)


def _before_log_softmax(emit: Emit, node: fx.Node, dim: int) -> fx.Node | None:
    """Return x if ``node`` is reshape*(log_softmax(x, dim)) and the reshape leaves the classes the last dim."""
    found = node
    while found.target is aten.reshape.default and shape_of(found)[-1] == shape_of(found.all_input_nodes[0])[-1]:
        found = found.all_input_nodes[0]
    if found.target not in LOG_SOFTMAXES:
        return None
    x, along = found.all_input_nodes[0], int(found.args[1]) % len(shape_of(found))  # pyright: ignore[reportArgumentType]
    last = len(shape_of(found)) - 1
    if along != (last if found is not node else dim) or (found is not node and dim != len(shape_of(node)) - 1):
        return None
    if x.meta["val"].dtype != found.meta["val"].dtype:
        x = applied(emit, aten.to.dtype, x, found.meta["val"].dtype)
    return viewed(emit, x, list(shape_of(node)))


NOTHING_IGNORED = -(1 << 40)  # no class id: this loss skips nothing


def _gather(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite the log-probability of one class a row as minus its unreduced cross-entropy (no class is ignored)."""
    x, index, val = args[0], args[2], node.meta["val"]
    dim = dim_of(args, kwargs, 1)
    last = len(shape_of(x)) - 1
    one_each = dim == last and last > 0 and shape_of(index) == (*shape_of(x)[:-1], 1)
    logits = _before_log_softmax(emit, x, last) if one_each else None
    if logits is None:
        return emit(node.target, args, kwargs, val)
    rows = viewed(emit, logits, [-1, shape_of(x)[-1]])
    loss = applied(
        emit, aten.cross_entropy_loss.default, rows, viewed(emit, index, [-1]), None, UNREDUCED, NOTHING_IGNORED
    )
    return viewed(emit, applied(emit, aten.neg.default, loss), list(shape_of(index)))


PRODUCTS: dict[Any, Rewrite] = table(
    {
        _einsum: "einsum",
        _matmul: "mv dot vdot",
        _outer: "outer ger",
        _bilinear: "bilinear",
        _convolution: "conv1d conv2d conv3d convolution conv1d.padding conv2d.padding conv3d.padding",
        _histc: "histc",
        _nll_loss: "nll_loss_nd nll_loss",
        _gather: "gather",
    }
)
