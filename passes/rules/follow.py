"""Dims that count the same things, followed from value to value by the rules of the calls between; and zeros.

    y = a + b           y[.., i] with a[.., i] and b[.., i], unless a size is 1
    einsum("ecd,edh->ech")     a label with itself
    y = x.reshape(…)    by the stride with which a part of x's dim counts: [E·t, h] and [E, t, h]

A place is (dim, inner): of a dim of n, the index of the thing counted is (i // inner) % size. A call keeps rows if it
maps the dims that count them, each index computed by itself. Zeros stay zero:

    x[E, C, d] @ W[E, d, h] + bias[E, 1, h]      C stays dim 1, E dim 0: both are batch
    gate · f(x), where(mask, f(x), 0)            zero where the gate is, and so is every gradient
    silu(gate·x·W) · (gate·x·V)
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from passes.program.ops.aten import draws, is_pointwise, shape_of
from passes.program.ops.groups import EXTREMES, is_grouped
from passes.rules.rule import RESULT, OpRule, operands_of
from passes.rules.table import rule_of

Place = tuple[int, int]  # dim, inner
Known = Callable[[fx.Node], OpRule | None]  # the rules of calls
TRIALS = 4


def tied(
    call: fx.Node, node: fx.Node, place: Place, size: int, known: Known = rule_of
) -> Iterator[tuple[fx.Node, Place]]:
    """Yield the places of ``call`` and its operands that count the same as one of ``node``, which is among them."""
    rule = known(call)
    if rule is None:
        return
    values = dict(enumerate(operands_of(call))) | {RESULT: call}
    for source in (i for i, value in values.items() if value is node):
        for target, other in values.items():
            if other is not node and (found := rule.carried(source, *place, size, target)) is not None:
                yield other, found


def tied_dims(call: fx.Node, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """Return (value, dim) of the same that are whole dims."""
    size = shape_of(node)[dim]
    found = tied(call, node, (dim, 1), size)
    return list(dict.fromkeys((n, d) for n, (d, inner) in found if inner == 1 and shape_of(n)[d] == size))


def follow(
    start: Mapping[fx.Node, int],
    calls: Collection[fx.Node],
    refusal: Callable[[fx.Node, str], Exception],
    why: str,
    *,
    every: bool = False,
) -> dict[fx.Node, int]:
    """Return the dims that count the same as those of ``start``, for all ``calls`` and operands that have one.

    Raises the error of ``refusal`` if a call acts along that dim (``why``), or has none where ``every`` one must, or if
    two dims of a value count the same.
    """
    known, work = dict(start), list(start)
    while work:
        node = work.pop()
        for call in (n for n in (node, *node.users) if n in calls):
            for other, dim in tied_dims(call, node, known[node]):
                if other not in known:
                    work.append(other)
                if known.setdefault(other, dim) != dim:
                    raise refusal(call, "two dims of a value count the same")
    for call in (n for n in sorted(calls) if n in known and n.op == "call_function"):
        if not _keeps(call, known):
            raise refusal(call, why)
    if every and (lost := sorted(n for n in calls if n not in known)):
        raise refusal(lost[0], why)
    return known


def _keeps(node: fx.Node, known: Mapping[fx.Node, int]) -> bool:
    """Whether a call maps the dim of each operand to its own, and each index that it makes is made of that index alone.

    A grouped product has its rows by position, and the ends of the experts' runs move with them.
    """
    read = [(i, n) for i, n in enumerate(operands_of(node)) if n in known]
    if any((node, known[node]) not in tied_dims(node, n, known[n]) for _, n in read):
        return False
    rule = rule_by_rows(node)
    is_by_runs = is_grouped(node.target) and len(node.all_input_nodes) == 3
    return is_by_runs or (rule is not None and all(rule.is_alone(i, known[n]) for i, n in read))


def rule_by_rows(node: fx.Node) -> OpRule | None:
    """Return the rule of a call; None without one, and for a call that draws numbers for all rows at once."""
    return None if draws(node.target) and not is_pointwise(node.target) else rule_of(node)


def stays_zero(node: fx.Node, zero: Collection[fx.Node]) -> bool:
    """Return whether a call's result is zero at the zeros of all its operands in ``zero``, for any other input."""
    read = [n for n in node.all_input_nodes if n in zero]
    if not read:
        return False
    if node.target is getitem or node.target in EXTREMES:
        return node.all_input_nodes[0] in zero
    rule, operands = rule_of(node), operands_of(node)
    if any(all(operands[i] in zero for i in together) for together in (rule.linear if rule is not None else ())):
        return True
    return is_pointwise(node.target) and _maps_to_zero(node, zero)


def _maps_to_zero(node: fx.Node, zero: Collection[fx.Node]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def number(n: fx.Node) -> Tensor:
        val = n.meta["val"]
        if n in zero:
            return torch.zeros([1] * val.dim(), dtype=val.dtype)
        drawn = torch.randn([1] * val.dim(), generator=generator) * 8
        return drawn > 0 if val.dtype == torch.bool else drawn.to(val.dtype)

    target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType]
    for _ in range(TRIALS):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), number)
        made = target(*args, **kwargs)
        if not isinstance(made, Tensor) or bool(made.any()):
            return False
    return True
