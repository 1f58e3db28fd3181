"""The products of experts, one expert's part of a value, and the weight that a value is a view of.

A dim of a view of a weight, or of a lookup in one, is traced to the parameter (passes/rules/follow.py). One expert's
part of a value is a single index of a dim, by slice, or as one of the parts of a split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import Tensor, fx

from passes.program.ops import groups
from passes.program.ops.aten import aten, named, packet_of, shape_of, tensors_of
from passes.program.ops.groups import CUTS, LAID_OUT, PRODUCTS, SPLITS
from passes.program.weights import is_parameter, is_weight
from passes.rules.follow import tied_dims
from passes.rules.rule import Role, operands_of
from passes.rules.table import rule_of


def is_grouped(node: fx.Node) -> bool:
    """Return whether it is the product of runs of rows, each with its own matrix: (x[t, i], W[e, i, o], ends[e])."""
    return groups.is_grouped(node.target) and len(node.all_input_nodes) == 3


def is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS or is_grouped(node)


def is_number(node: fx.Node) -> bool:
    """Return whether a value is one number, the same for all."""
    val = node.meta["val"]
    return isinstance(val, Tensor) and val.numel() == 1 and not node.meta["grad"]


def is_float(node: fx.Node) -> bool:
    value = next(tensors_of(node), None)
    return value is not None and value.dtype.is_floating_point


def lookup(node: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """Return (table, its dim, ids) of a call that reads full slices of a table by one tensor of ids."""
    if packet_of(node.target) not in (aten.embedding, aten.index_select, aten.index):
        return None
    rule, read = rule_of(node), operands_of(node)
    mixed = [place for f in rule.factors if f.role is Role.MIX and (place := f.at(0))] if rule is not None else []
    return (read[0], mixed[0].dim, read[1]) if len(read) == 2 and len(mixed) == 1 else None


# ---- one expert's part of a value, and the weight that a value is a view of


@dataclass(frozen=True, slots=True)
class Pick:
    """Index ``number`` of ``whole`` along ``dim``, as a dim of size 1, which ``node`` takes."""

    node: fx.Node
    whole: fx.Node
    dim: int
    number: int


def pick_of(node: fx.Node) -> Pick | None:
    """Return the single index that a call takes; None for a call that takes anything else."""
    call = node.all_input_nodes[0] if node.target is getitem else node
    if call.target not in (SPLITS if node.target is getitem else CUTS):
        return None
    whole, given = call.all_input_nodes[0], named(call)
    dim = int(given["dim"]) % len(shape_of(whole))
    size = shape_of(whole)[dim]
    is_one = len(call.meta["val"]) == size if node.target is getitem else shape_of(node)[dim] == 1
    number: Any = node.args[1] if node.target is getitem else given["start"] or 0
    return Pick(node, whole, dim, number % size) if is_one else None


def picks(whole: fx.Node, dim: int) -> Iterator[Pick]:
    """Yield all single indices of a value along a dim."""
    parts = [part for user in whole.users if user.target in SPLITS for part in user.users]
    for node in (*whole.users, *parts):
        found = pick_of(node)
        if found is not None and (found.whole, found.dim) == (whole, dim):
            yield found


def pick_of_weight(node: fx.Node) -> Pick | None:
    """Return the pick of one expert's matrix of a stack, or of its values of a table; None for other values."""
    found = pick_of(node) if node.op == "call_function" else None
    return found if found is not None and is_parameter(found.whole) else None


def origin_of(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """Return the parameter and its dim that a dim of a view or a change of it is; None for others. A value computed of
    weights is a changed weight if it has all its dims."""
    while not is_parameter(node):
        if node.target is getitem and (pick := pick_of_weight(node)) is not None:
            return (pick.whole, dim) if dim != pick.dim else None
        source = _source_of(node)
        up = [d for n, d in tied_dims(node, node, dim) if n is source]
        if source is None or len(up) != 1:
            return None
        node, dim = source, up[0]
    return node, dim


def _source_of(node: fx.Node) -> fx.Node | None:
    """Return the weight that ``node`` is a view or a change of, or a value that is one of a weight."""
    values = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    floats = [n for n in values if n.meta["val"].dtype.is_floating_point]
    if is_view(node):
        found = floats if len(floats) == 1 else []
    else:
        dims = range(len(shape_of(node)))
        found = [n for n in floats if is_weight(node) and all(n in dict(tied_dims(node, node, d)) for d in dims)]
        found = [n for n in found if len(shape_of(n)) == len(dims)]
    is_of_weight = (n for n in found if is_parameter(n) or pick_of_weight(n) is not None or _source_of(n) is not None)
    return next(is_of_weight, None)


def is_view(node: fx.Node) -> bool:
    """Return whether a call gives the same elements of one value, or some of them."""
    return node.target in LAID_OUT or pick_of(node) is not None or lookup(node) is not None


def base(node: fx.Node) -> fx.Node:
    """Return the value that ``node`` has the elements of, in another layout."""
    while node.target in LAID_OUT:
        node = node.all_input_nodes[0]
    return node
