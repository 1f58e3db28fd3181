"""Find ops that mix the sequences of a batch: there a microbatch cannot compute the values of the global batch.

    x − x.mean(0)        statistics over the batch            z @ z.T              each sequence with each other
    softmax, cumsum …    along the batch                      x[: n // 2], flip    one half against the other
    a user's own backward that does not work sequence by sequence, or (on weights alone) is not linear

The rule of an op (passes.rules) says which dims it mixes; of an op without one that is not known. Whether a dim holds
the batch is known from two captures (capture.batch.two_captures). The second costs as much as the first, so it is made
only if an op could do one of these; a sum over the features, as of a norm, could not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, is_pointwise, packet_of, tensors_of
from passes.program.ops.groups import JOINS, LAID_OUT, PLACING, Ops
from passes.program.ops.own_backward import OwnBackward
from passes.program.ops.products import is_grouped
from passes.program.program import Program
from passes.program.walks import operands, walk
from passes.rules.call import operands_of
from passes.rules.rule import Factor, OpRule, Role
from passes.rules.table import rule_of

# They put rows elsewhere, each by itself; capture.loss.joins and .parts follow the batch through them.
ELSEWHERE = PLACING | JOINS | Ops("index gather embedding pad constant_pad_nd")

BatchDims = Callable[[fx.Node], frozenset[int] | None]  # the dims of a value that hold the batch, if known


def has_gradient(node: fx.Node) -> bool:
    return node.op == "call_function" and any(n.meta.get("grad") or n.meta.get("stopped") for n in node.all_input_nodes)


def computed_along(program: Program, on_batch: Collection[fx.Node], loss: Collection[fx.Node]) -> list[fx.Node]:
    """Values computed from the batch outside of ``loss`` that affect gradients: those with a gradient, and others that
    they read, such as a maximum over the ids that scales an embedding, or the places that tokens take in turn.
    """
    inner = [n for n in program.graph.graph.nodes if n in on_batch and n not in loss]
    with_gradient = {n for n in inner if has_gradient(n)}
    within = set(inner)
    read = set(walk(with_gradient, operands, into=within.__contains__))
    return [n for n in inner if n in with_gradient or (n in read and n.op == "call_function")]


def is_own_loss(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Whether a user's own backward makes a term of the loss, which is reported as one."""
    value = node.meta["val"]
    if not isinstance(node.target, OwnBackward):
        return False
    is_number = not isinstance(value, (tuple, list)) and value.dim() == 0
    return is_number and any(user.op == "output" or user in others for user in node.users)


# ---- whether an op mixes the sequences


def is_unknown(node: fx.Node) -> bool:
    """An op without a rule may do anything."""
    makes_tensor = node.op == "call_function" and not _is_plain(node) and any(True for _ in tensors_of(node))
    return makes_tensor and not _puts_elsewhere(node) and not _has_own_backward(node) and rule_of(node) is None


def may_mix(node: fx.Node, on_batch: Collection[fx.Node]) -> bool:
    """Decided by the op alone, as if dim 0 of each value held the batch: cheap, and true of few ops."""
    if node.op != "call_function" or _is_plain(node):
        return False
    held = [frozenset({0} if n in on_batch else ()) for n in operands_of(node)]
    if _has_own_backward(node):
        return not _works_by_sequence(node, held)
    return _mixes(node, held, of_products_alone=True)


def mixes_along_a_dim(node: fx.Node) -> bool:
    """Whether an op makes one value of all that lie along a dim: then it matters which dim holds the batch."""
    is_cut = packet_of(node.target) in (aten.slice, aten.split_with_sizes) or _is_plain(node)
    rule = None if node.op != "call_function" or is_cut or _puts_elsewhere(node) else rule_of(node)
    return rule is not None and not all(f.role is Role.EACH for f in rule.factors)


def may_run_along(node: fx.Node, flow: Mapping[fx.Node, frozenset[int] | None]) -> bool:
    """Of an op that may mix: whether a dim that it mixes may hold the batch (passes.partition.batch.flow)."""
    held = [flow.get(n) for n in operands_of(node)]
    return (
        _has_own_backward(node) or any(dims is None for dims in held) or _mixes(node, [d or frozenset() for d in held])
    )


def mixes(node: fx.Node, dims_of: BatchDims) -> bool:
    """Whether an op does mix. False if it is not known which dims hold the batch."""
    held = [dims_of(n) for n in operands_of(node)]
    if any(dims is None for dims in held):
        return False
    known = [dims or frozenset[int]() for dims in held]
    return not _works_by_sequence(node, known) if _has_own_backward(node) else _mixes(node, known)


def _is_plain(node: fx.Node) -> bool:
    """By elements, or a view: known without its rule, and most calls are."""
    return is_pointwise(node.target) or node.target in LAID_OUT


def _has_own_backward(node: fx.Node) -> bool:
    return isinstance(node.target, OwnBackward)


def _works_by_sequence(node: fx.Node, held: Sequence[Collection[int]]) -> bool:
    """Whether it was shown to work part by part along the dims that hold the batch."""
    cuts: Any = node.target.facts.cuts  # pyright: ignore
    return any(
        all(dim in dims if dims else dim is None for dim, dims in zip(cut.inputs, held, strict=True)) for cut in cuts
    )


def _puts_elsewhere(node: fx.Node) -> bool:
    """Or multiplies each row by one of several matrices: no row depends on another."""
    return node.target in ELSEWHERE or node.target is getitem or is_grouped(node.target)


def _is_product(rule: OpRule) -> bool:
    return any(f.role is Role.SUM and len(f.places) > 1 for f in rule.factors)


def _mixes(node: fx.Node, held: Sequence[Collection[int]], *, of_products_alone: bool = False) -> bool:
    """``held``: the dims of each operand that hold the batch. Sequences of two operands may be combined in pairs;
    ``of_products_alone``: only products are asked for that."""
    rule = rule_of(node) if any(held) and not _puts_elsewhere(node) else None
    if rule is None:
        return False
    found = [(i, f) for i, dims in enumerate(held) for dim in dims for f in rule.along(i, dim)]
    if any(f.role is not Role.EACH for _, f in found):
        return True
    return (not of_products_alone or _is_product(rule)) and any(_pairs(rule, f, held) for _, f in found)


def _pairs(rule: OpRule, factor: Factor, held: Sequence[Collection[int]]) -> bool:
    """Whether each sequence is combined with all those of another operand."""
    for i, dims in enumerate(held):
        place = factor.at(i)
        if dims and i not in rule.unread and (place is None or place.dim not in dims):
            return True
    return False
