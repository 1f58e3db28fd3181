"""Rules that users give for ops of their own, registered with torch.library (a custom kernel, say).

    meshwright.rule("mylib::scaled_linear", "b s h+, o h+ -> b s o")

Each is tried on small random inputs when it is given, by values and by gradients: the op on the parts of a factor
against the op on the full operands.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import PlanError, Where
from passes.program.ops.aten import packet_of
from passes.rules.notation import Pattern, parse
from passes.rules.rule import Call, OpRule, Role, call_of
from passes.rules.trials import called, tried

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
        """Count the FLOPs of one forward call."""
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
    caller = sys._getframe(1)
    where = Where(file=caller.f_code.co_filename, line=caller.f_lineno)
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


def flops_of_pattern(pattern: Pattern) -> Flops | None:
    """Of an op that sums a dim over two operands: a product's. None for any other op, which is bound by memory."""
    words = {word for term in pattern.operands for word in term}
    joined = [w for w in words if sum(w in term for term in pattern.operands) > 1]
    is_product = any(pattern.roles.get(word) is Role.SUM for word in joined)
    return (lambda sizes: 2 * torch.Size(sizes.values()).numel()) if is_product else None


# ---- checks


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


# ---- try a rule that a user gives: the op runs on an example, and on the parts of each factor of it


SIZES = (4, 6, 8, 10, 12, 14, 16, 18)  # of the words: even, and no two are equal
SCALES = (1.0, 30.0)  # of random values
FREE_SIZES = (2, 3)  # of the dims that "..." stands for


class NotTrue(Exception):
    """The text continues "the rule of ..."; ``fix``: the remedy."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def try_rule(
    rule: Callable[[Call], OpRule | None], target: Any, pattern: Pattern, example: Sequence[Any] | None
) -> None:
    """Raises NotTrue if the rule does not fit the example, or is not true of it."""
    problem = ""
    for args in [tuple(example)] if example is not None else _examples(pattern):
        try:
            node, values = called(target, *args)
        except Exception as error:  # whatever an op raises on tensors that it was not written for
            problem = problem or f"{type(error).__name__}: {_first_line(error)}"
            continue
        return _check(rule, node, values)
    raise NotTrue(
        f"could not be tried: the op fails on an example ({problem})", "give arguments that it runs on: example=(x, w)"
    )


def _check(rule: Callable[[Call], OpRule | None], node: fx.Node, values: dict[str, Tensor]) -> None:
    call = call_of(node)
    found = rule(call) if call is not None else None
    if call is None or found is None:
        shapes = ", ".join(str(list(x.shape)) for x in values.values())
        raise NotTrue(
            f"does not fit the example {shapes} -> {list(call.result) if call is not None else node.meta['val']}",
            "give each dim of each operand a word, and each word one size",
        )
    try:
        _tried(node, found, values)
    except AssertionError as error:
        raise NotTrue(
            f"is not true of an example: {_first_line(error)}",
            'mark a word that is summed over with "+", and one that is neither with "^"',
        ) from None


def _tried(node: fx.Node, rule: OpRule, values: dict[str, Tensor]) -> None:
    """By values alone for an op without a backward; in float64 on large values too."""
    scales = SCALES if all(x.dtype == torch.float64 for x in values.values() if x.is_floating_point()) else SCALES[:1]
    for scale in scales:
        scaled = {name: x * scale if x.is_floating_point() else x for name, x in values.items()}
        try:
            tried(node, rule, scaled)
        except RuntimeError:
            with torch.no_grad():
                tried(node, rule, scaled)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _examples(pattern: Pattern) -> Iterator[tuple[Tensor, ...]]:
    """Random tensors in float64, and in float32 for an op that knows no other."""
    words = dict.fromkeys(w for term in (*pattern.operands, pattern.result) for w in term if w != "...")
    sizes = dict(zip(words, SIZES * len(words), strict=False))
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        shapes = [[n for w in t for n in (FREE_SIZES if w == "..." else (sizes[w],))] for t in pattern.operands]
        yield tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
