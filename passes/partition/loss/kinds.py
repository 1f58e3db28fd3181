"""The relation of a microbatch's value to the same value of the global batch in one process.

    WHOLE     the same: parameters, constants, counts of the global batch, and values made of them
    ROWS(d)   the microbatches' values, one after the other along dim d, are the global one
    UNIT      made of one sequence alone: a loop over the batch takes them one by one
    SHARE     the microbatches' values add up to the global one, term by term (passes.partition.loss.shares)
    LOOSE(d)  … if summed over dim d too
    UNKNOWN   none of these

A value may be made of a part of the microbatch: one sequence, or a chunk. Once equal computations of all parts are
summed or concatenated, the result is a value of the full microbatch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import arguments, aten, is_random, named, packet_of, position_of, shape_of
from passes.program.ops.groups import Ops
from passes.rules.rule import RESULT, Factor, Role, operands_of
from passes.rules.table import rule_of

WHOLE, ROWS, UNIT, SHARE, LOOSE, UNKNOWN = "whole", "rows", "unit", "share", "loose", "unknown"
MEANS = "means"  # the order of a share that holds a mean over its part
PLACES = "places"  # the order of the rows 0, 1, 2 …, the rows' places in the batch


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The microbatch from ``start`` to ``stop``, both of 0 … 1. ``even``: all parts of it are equally long."""

    start: Fraction
    stop: Fraction
    even: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """``part``: the part of the microbatch that it is made of, if not all. ``order``: of rows that are not in the
    batch's order.

    ``like``: values of the same ``like`` are made in the same way, each of its own part.
    """

    name: str
    dim: int = 0
    part: BatchPart | None = None
    order: Any = None
    like: int = 0


whole, unknown, share = Kind(WHOLE), Kind(UNKNOWN), Kind(SHARE)


def are_complete(kinds: Sequence[Kind]) -> bool:
    """Return whether all equal values together cover the full microbatch; means of chunks need equal chunks."""
    alike: dict[int, list[BatchPart]] = {}
    for kind in kinds:
        if kind.part is None or (kind.order == MEANS and not kind.part.even):
            return False
        alike.setdefault(kind.like, []).append(kind.part)
    return all(tile([(part.start, part.stop) for part in parts]) for parts in alike.values())


def tile(ranges: list[tuple[Any, Any]], stop: Any = 1) -> bool:
    """Return whether the ranges, sorted, fill 0 … stop without a gap and without an overlap."""
    found = sorted(ranges)
    ends = [0, *(b for _, b in found)]
    return bool(found) and ends[-1] == stop and all(a == end for (a, _), end in zip(found, ends, strict=False))


NONE, MEAN, SUM = 0, 1, 2
AFFINE = Ops("add sub subtract rsub where masked_fill")  # linear in their tensors and numbers together


def reduction_of(node: fx.Node) -> int | None:
    """Return the reduction code of a loss op; None for any other op."""
    return named(node).get("reduction") if getattr(node.target, "namespace", "") == "aten" else None


def unreduced(node: fx.Node) -> tuple[list[Any], dict[str, Any], torch.Size]:
    """Return the arguments of a loss op that give the loss of each row, or of each element, and the shape of these."""
    args, kwargs, position = list(node.args), dict(node.kwargs), position_of(node.target, "reduction")
    kwargs.pop("reduction", None)
    args[position:] = [NONE, *args[position + 1 :]] if len(args) > position else args[position:]
    kwargs |= {} if len(args) > position else {"reduction": NONE}
    given: Any = fx.map_arg((tuple(args), kwargs), lambda n: torch.empty_like(n.meta["val"], device="meta"))
    target: Any = node.target
    return args, kwargs, target(*given[0], **given[1]).shape


def reduces_rows(node: fx.Node, dim: int = 0) -> bool:
    """Return whether a loss op adds up, or averages, the losses of rows along a dim of its operands."""
    return bool(reduction_of(node)) and dim < len(unreduced(node)[2])


def counts_inputs(node: fx.Node, from_inputs: Mapping[str, bool]) -> bool:
    """Return whether a cross-entropy's denominator can be counted before the forward; true if there is none."""
    given = arguments(node)
    target, weight = given["target"], given.get("weight")
    if reduction_of(node) != MEAN or target.meta["val"].is_floating_point():
        return True
    return bool(from_inputs.get(target.name)) and (weight is None or weight.name in from_inputs)


def call_like(like: fx.Node, target: Any, args: Any, kwargs: Any = None, value: torch.Tensor | None = None) -> fx.Node:
    """Return a call where the graph inserts, with the meta values of another node; ``value``: its own."""
    new = like.graph.call_function(target, tuple(args), kwargs or {})
    new.meta = dict(like.meta) if value is None else {**like.meta, "val": value}
    return new


def is_mean(node: fx.Node) -> bool:
    return packet_of(node.target) is aten.mean or reduction_of(node) == MEAN


def linear_in(node: fx.Node, moving: Collection[fx.Node], *, numbers: bool = True) -> list[fx.Node]:
    """The operands that a call is linear in together, all of ``moving`` among them; empty if there are none such.

    ``numbers``: whether a number may be added to them, of which each share then has a part.
    """
    rule, operands = rule_of(node), operands_of(node)
    if rule is None or is_random(node):
        return []
    sets, given = rule.linear, arguments(node)
    if numbers and node.target in AFFINE:
        condition = given.get("condition", given.get("mask"))
        sets = (frozenset(i for i, n in enumerate(operands) if n is not condition),)
    at = {i for i, n in enumerate(operands) if n in moving}
    return [operands[i] for i in sorted(next((s for s in sets if at <= s), ()))]


def adds_rows(node: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    """Whether a call adds up, or averages, the rows along these dims of operands: the same rows of all of them."""
    factor = _common(node, dims)
    if factor is None:
        return False
    return factor.role is Role.SUM or (packet_of(node.target) is aten.mean and factor.at(RESULT) is None)


def dim_kept(node: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """The place in the result of the rows along these dims, of a merged dim the outer part; None if not known."""
    factor = _common(node, dims)
    place = factor.at(RESULT) if factor is not None and factor.role is Role.EACH else None
    is_outer = place is not None and factor is not None and place.inner * factor.size == shape_of(node)[place.dim]
    return place.dim if place is not None and is_outer else None


def _common(node: fx.Node, dims: Mapping[fx.Node, int]) -> Factor | None:
    """Return the one factor that is all of each of these dims."""
    rule = rule_of(node)
    found = {rule.sole(i, dims[n]) for i, n in enumerate(operands_of(node)) if n in dims} if rule is not None else set()
    return found.pop() if len(found) == 1 else None
