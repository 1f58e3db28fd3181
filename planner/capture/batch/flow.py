"""The dims of a value that may hold the batch, from one capture: enough to see that an op runs along other dims.

    ids [b, t] → 0      embedding → 0      x.transpose(0, 1) → 1      x.view(b·h, t, d) → 0, in steps of h

A dim that is not named holds no sequence beside another; one that is named may. An op that is not known here makes all
its dependents unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from planner.capture.batch.mixing import dims_along
from planner.capture.loss.counts import REDUCTIONS
from planner.capture.loss.loss_ops import CASTS
from planner.graph.ops.aten import is_pointwise, reduced_dims
from planner.graph.ops.spatial import dims_of_image, is_spatial
from planner.graph.program import Program

Run = tuple[int, int, int]  # a dim, the distance of two sequences along it, and their number
Dims = frozenset[Run]
SAME = {"contiguous", "clone", "detach", "alias", "dropout", "to", "softmax", "_softmax", "log_softmax", "_log_softmax",
        "layer_norm", "rms_norm", "cumsum", "slice", "split_with_sizes", "rand_like",
        "randn_like", "bernoulli", "one_hot"}  # fmt: skip
BESIDE = {"topk", "sort", "argsort", "msort", "gather", "scatter", "scatter_add", "cummax", "cummin", "flip", "roll",
          "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft"}  # fmt: skip


def batch_flow(program: Program, on_batch: Collection[fx.Node]) -> dict[fx.Node, frozenset[int] | None]:
    """Node → dims that may hold the batch; None if that is not known. Microbatches hold two sequences or more."""
    flow = batch_runs(program, on_batch)
    return {node: None if runs is None else frozenset(dim for dim, *_ in runs) for node, runs in flow.items()}


def batch_runs(program: Program, on_batch: Collection[fx.Node]) -> dict[fx.Node, frozenset[Run] | None]:
    """The same, each dim with the distance of two sequences along it, and their number."""
    flow: dict[fx.Node, Dims | None] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            size = int(node.meta["val"].shape[0]) if node.name in program.inputs else 0
            flow[node] = frozenset({(0, 1, size)} if size else ())
        elif node.op == "call_function":
            flow[node] = _dims_of(node, flow) if node in on_batch else frozenset()
    return flow


def _anywhere(node: fx.Node) -> Dims:
    return frozenset((d, 1, n) for d, n in enumerate(_shape(node)))


def _dims_of(node: fx.Node, flow: dict[fx.Node, Dims | None]) -> Dims | None:
    given = {n: dims for n in node.all_input_nodes if (dims := flow.get(n)) is not None}
    if len(given) < len(node.all_input_nodes):
        return None
    name = getattr(node.target, "_opname", "")
    first = node.all_input_nodes[0]
    if node.target is operator.getitem or name in SAME:
        return given[first]
    if name == "cat" and any(dim == _cat_dim(node) for dims in given.values() for dim, *_ in dims):
        return None
    if is_by_element(node.target) or name in ("expand", "cat"):
        return frozenset().union(*(_aligned(dims, n, node) for n, dims in given.items()))
    if name == "reshape":
        return _reshaped(given[first], _shape(first), _shape(node))
    if name == "repeat":
        return _aligned(given[first], first, node)  # a dim that is repeated holds the sequences again and again
    if name == "permute":
        order = [int(d) % len(_shape(node)) for d in node.args[1]]  # pyright: ignore
        return frozenset((order.index(d), *run) for d, *run in given[first])  # pyright: ignore
    if name == "embedding":
        return given[node.args[1]]  # pyright: ignore
    if name in ("linear", "matmul", "bmm", "mm", "scaled_dot_product_attention"):
        return _product(node, given)
    if name == "einsum":
        return _by_letters(node, given)
    if name in BESIDE:
        return _beside(node, given)
    if is_spatial(node):
        return _over_images(node, given)
    if name in REDUCTIONS and isinstance(node.meta["val"], Tensor):
        return _reduced(node, given[first])
    return None


def is_by_element(target: Any) -> bool:
    return is_pointwise(target) or torch.Tag.pointwise in getattr(target, "tags", ()) or target in CASTS


def _cat_dim(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % len(_shape(node))  # pyright: ignore[reportArgumentType]


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(int(n) for n in (value if isinstance(value, Tensor) else value[0]).shape)


def _aligned(dims: Dims, operand: fx.Node, result: fx.Node) -> Dims:
    """Of a broadcast operand, seen in the result."""
    shift = len(_shape(result)) - len(_shape(operand))
    return frozenset((d + shift, step, count) for d, step, count in dims)


def _reshaped(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Sequences that are ``near`` to ``far`` elements apart are on each new dim with steps in that range."""
    found: set[Run] = set()
    for dim, step, count in dims:
        near = step * prod(before[dim + 1 :])
        far = near * count
        for new, size in enumerate(after):
            stride = prod(after[new + 1 :])
            end = stride * size
            if size == 1 or near % end == 0 or stride % far == 0:
                continue  # all of it is below, or above
            first, last = max(near, stride), min(far, end)
            even = first % stride == 0 and last % first == 0 and first % near == 0
            found.add((new, first // stride, last // first) if even else (new, 1, size))
    return frozenset(found)


def _product(node: fx.Node, given: dict[fx.Node, Dims]) -> Dims:
    """Rows of the first operand and columns of the second stay; a sum along the batch leaves it anywhere."""
    is_attention = "attention" in str(node.target)
    left, right = node.all_input_nodes[0], node.all_input_nodes[-1]
    summed = {left: {-1}, right: {-1} if "linear" in str(node.target) else {-2}}
    found: set[Run] = set()
    for operand, dims in given.items():
        size = len(_shape(operand))
        inner = {-1, -2} if is_attention else summed.get(operand, set())  # pyright: ignore
        if dims and (size < 2 or any(d - size in inner for d, *_ in dims)):
            return _anywhere(node)
        found.update(_beside_vector(dims, operand, node) or _aligned(dims, operand, node))
    return frozenset(found)


def _by_letters(node: fx.Node, given: dict[fx.Node, Dims]) -> Dims | None:
    """Of an einsum: a letter of the result is a dim of it; a sum along the batch leaves it anywhere."""
    words, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
    if not arrow or "." in words:
        return None
    found: set[Run] = set()
    for word, operand in zip(words.split(","), node.args[1], strict=True):  # pyright: ignore
        for dim, step, count in given[operand]:  # pyright: ignore
            if word[dim] not in result:
                return _anywhere(node)
            found.add((result.index(word[dim]), step, count))
    return frozenset(found)


def _beside(node: fx.Node, given: dict[fx.Node, Dims]) -> Dims:
    """Operands of equal dims; the op splits one of the dims: the others stay."""
    dims = frozenset().union(*given.values())
    return _anywhere(node) if any(dim in dims_along(node) for dim, *_ in dims) else dims


def _over_images(node: fx.Node, given: dict[fx.Node, Dims]) -> Dims:
    """The dims that the op does not run along stay; weights have none."""
    image = node.all_input_nodes[0]
    runs_along = any(dim in dims_of_image(node) for dim, *_ in given[image])
    others = any(dims for operand, dims in given.items() if operand is not image)
    return _anywhere(node) if runs_along or others else given[image]


def _beside_vector(dims: Dims, operand: fx.Node, node: fx.Node) -> Dims:
    """Of a matrix times a vector, or a vector times a matrix: the dim that is summed over is gone; else none."""
    left, right = node.all_input_nodes[0], node.all_input_nodes[-1]
    if operand is left and len(_shape(right)) == 1:
        return dims
    last = len(_shape(operand)) - 1
    is_after = operand is right and len(_shape(left)) == 1
    return frozenset((d - (d == last), step, count) for d, step, count in dims) if is_after else frozenset()


def _reduced(node: fx.Node, dims: Dims) -> Dims:
    done, before, after = reduced_dims(node), len(_shape(node.all_input_nodes[0])), len(_shape(node))
    if any(d in done for d, *_ in dims):
        return _anywhere(node)
    kept = [d for d in range(before) if before == after or d not in done]
    return frozenset((kept.index(d), step, count) for d, step, count in dims)
