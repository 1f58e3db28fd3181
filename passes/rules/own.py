"""Rules that users give for ops of their own, registered with torch.library (a custom kernel, say).

    planner.rule("mylib::scaled_linear", "b s h+, o h+ -> b s o")

Each is tried on small random inputs when it is given, by values and by gradients: the op on the parts of a factor
against the op on the full operands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.errors import PlanError, Where
from passes.program.ops.aten import packet_of
from passes.rules.call import Call, call_of
from passes.rules.notation import Pattern, parse
from passes.rules.own_trial import NotTrue, try_rule
from passes.rules.rule import OpRule, Role

Flops = Callable[[Mapping[str, int]], float]


@dataclass(frozen=True, slots=True)
class OwnRule:
    """``flops``: of one forward call, by the sizes of the words; None for an op that is bound by memory."""

    op: str
    text: str
    pattern: Pattern
    flops: Flops | None = None

    def rule(self, call: Call) -> OpRule | None:
        """None for a call with other dims than the text has."""
        return self.pattern.rule(call) if self.pattern.fits(call) else None

    def flops_of(self, node: fx.Node) -> int:
        """Of one forward call."""
        call = call_of(node)
        if self.flops is None or call is None or not self.pattern.fits(call):
            return 0
        return int(self.flops(self.pattern.sizes(call)))


OWN: dict[Any, OwnRule] = {}


def rule(op: str, text: str, *, flops: Flops | None = None, example: Sequence[Any] | None = None) -> None:
    """Say how an op of your own may be sharded: which dims of its tensors are the same index.

    op:       "namespace::name", as registered with torch.library
    text:     the dims of each tensor operand in the order of the op's arguments, and of its (first) result:
              "b s h+, o h+ -> b s o". A word is computed by itself wherever it stands; "+": summed over; "^":
              anything else, and never sharded. "..." stands for any dims in front.
    flops:    floating-point operations of a call, by the sizes of the words: ``lambda n: 2 * n["b"] * n["h"]``; "..."
              is the product of the dims in front. By default those of a product, if some dim of two operands is
              summed over.
    example:  arguments of the op for the trial, floating-point tensors with sizes that are even; needed if the op has
              arguments other than tensors that have no default, or reads indices.

    Raises PlanError, at the line of the caller, if the text cannot be read, does not fit the op, or is not true of the
    example. The latest rule of an op holds.
    """
    where = _line_of_caller()
    target = _registered(op, where)
    try:
        pattern = parse(text)
    except ValueError as error:
        raise PlanError(f"the rule of {op}: {error}", where=where, fix='write it as "b s h+, o h+ -> b s o"') from None
    _check_number(op, target, pattern, where)
    own = OwnRule(op, text, pattern, flops if flops is not None else flops_of_pattern(pattern))
    try:
        try_rule(own.rule, target, pattern, example)
    except NotTrue as error:
        raise PlanError(f'the rule of {op}, "{text}", {error}', where=where, fix=error.fix) from None
    OWN[packet_of(target)] = own


def own_rule(target: Any) -> OwnRule | None:
    return OWN.get(packet_of(target))


def own_rule_texts() -> list[list[str]]:
    """All rules: a captured program depends on them."""
    return sorted([own.op, own.text] for own in OWN.values())


def flops_of_pattern(pattern: Pattern) -> Flops | None:
    """Of an op that sums a dim over two operands: a product's. None for any other op, which is bound by memory."""
    words = {word for term in pattern.operands for word in term}
    joined = [w for w in words if sum(w in term for term in pattern.operands) > 1]
    is_product = any(pattern.roles.get(word) is Role.SUM for word in joined)
    return (lambda sizes: 2 * torch.Size(sizes.values()).numel()) if is_product else None


# ---- checks


def _line_of_caller() -> Where:
    frame = sys._getframe(2)
    return Where(file=frame.f_code.co_filename, line=frame.f_lineno)


def _registered(op: str, where: Where) -> Any:
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None) if namespace and name else None
    if packet is None:
        fix = "register it with torch.library before this line; the name is namespace::name"
        raise PlanError(f"no op {op} is registered", where=where, fix=fix)
    target = getattr(packet, overload or packet.overloads()[0], None)
    if target is None:
        fix = f"choose from {', '.join(packet.overloads())}"
        raise PlanError(f"{namespace}::{name} has no overload {overload}", where=where, fix=fix)
    return target


def _check_number(op: str, target: Any, pattern: Pattern, where: Where) -> None:
    tensors = [a for a in target._schema.arguments if "Tensor" in str(a.type)]
    needed = sum("Optional" not in str(a.type) and "?" not in str(a.type) for a in tensors)
    is_any = any("List" in str(a.type) for a in tensors)
    found = len(pattern.operands)
    if found < needed or (found > len(tensors) and not is_any):
        names = ", ".join(a.name for a in tensors)
        what = f"the rule of {op} has {found} operands, and the op has {len(tensors)} tensors ({names})"
        raise PlanError(what, where=where, fix="write the dims of each tensor, apart by commas")
