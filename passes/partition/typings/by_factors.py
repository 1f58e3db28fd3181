"""Types of a call by the factors of its rule (planner/rules): the op itself runs on the tensors of a rank.

each by itself   every operand that has the factor is sharded there, and the result; the others are R
linear           P in some operands, P out; the other operands are R
own backward     y[.., i/tp, ..], .. = f(x[.., i/tp, ..], w): w, which every part reads in full, is R

A cut of a dim is carried as a whole, with its segments and its padding, where one factor is all of the dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.partition.typings.base import Form, Option, Site
from passes.program.ops.aten import draws
from passes.program.ops.own_backward import OwnBackward
from passes.rules.rule import RESULT, Role, operands_of
from passes.types.types import P, Placement


@dataclass(frozen=True, slots=True)
class Dims:
    """The dims at which a factor stands: of each input that has it, and of the result, if any."""

    inputs: dict[fx.Node, int]
    out: int | None

    def of_result(self, cut: Placement) -> Placement:
        """Return the type of the result: P if they are summed over."""
        return cut.moved(self.out) if self.out is not None else P

    def candidates(self, site: Site) -> list[Placement]:
        """Return the cuts under discussion for any of them, as of dim 0."""
        found = {c.moved(0) for node, dim in self.inputs.items() for c in site.candidates(node) if c.dim == dim}
        if self.out is not None:
            found |= {c.moved(0) for c in site.candidates() if c.dim == self.out}
        return sorted(found)


def by_factors(site: Site) -> Iterator[Option]:
    """Yield all that follow from the rule of a call, but for sums."""
    yield from each(site)
    yield from linear(site)


def each(site: Site, form: Form = Form.PARTS) -> Iterator[Option]:
    """Of factors that are by themselves. An op repeats an operand along a dim that the operand lacks as often as its
    arguments say: ``Form.SIZES`` makes that local.

    Each rank draws its own random numbers, and a replicated segment must be the same on all.
    """
    may_draw = draws(site.node.target)
    for dims in dims_of_factors(site, Role.EACH):
        for cut in dims.candidates(site) if dims.inputs or form is Form.SIZES else ():
            if not (may_draw and cut.has_whole_segment):
                yield site.option(dims.of_result(cut), given_of(dims, cut), form)


def linear(site: Site) -> Iterator[Option]:
    """Yield partial sums in, partial sums out. A cast to fewer bits would round each part, so it carries none."""
    operands = operands_of(site.node)
    for together in site.rule.linear if site.grad(site.node) else ():
        inside = {operands[i] for i in together}
        outside = {n for i, n in enumerate(operands) if i not in together}
        if inside.isdisjoint(outside) and not any(_narrows(site, n) for n in inside):
            yield site.partial(inside)


def own_backward(site: Site) -> Iterator[Option]:
    """Of a user's Function, along the dims over which its backward was shown to work part by part: all outputs are cut
    alike (an item of a tuple takes the cut of the tuple)."""
    call = site.node.target
    assert isinstance(call, OwnBackward)
    for cut in call.facts.cuts:
        inputs = _each_once(site.args, cut.inputs)
        dims = Dims(inputs or {}, cut.dim)
        for placement in dims.candidates(site) if inputs is not None else ():
            # padding holds no data to run on; a replicated segment has partial sums as gradients
            if not placement.padding and (call.facts.linear or not placement.has_whole_segment):
                yield site.option(dims.of_result(placement), given_of(dims, placement), Form.PARTS)


def dims_of_factors(site: Site, role: Role) -> Iterator[Dims]:
    """Yield the dims of each factor that is all of a dim wherever it stands."""
    operands, rule = operands_of(site.node), site.rule
    for factor in rule.factors:
        if factor.role is role and all(rule.sole(p.operand, p.dim) is factor for p in factor.places):
            at, result = [factor.at(i) for i in range(len(operands))], factor.at(RESULT)
            inputs = _each_once(operands, [place.dim if place is not None else None for place in at])
            if inputs is not None and (result is not None or role is Role.SUM):
                yield Dims(inputs, result.dim if result is not None else None)


def _each_once(operands: Sequence[Any], dims: Iterable[int | None]) -> dict[fx.Node, int] | None:
    """Return the dim of each operand that has one; None if a tensor stands in the call twice, and would be sharded in
    two ways."""
    found: dict[fx.Node, int | None] = {}
    if any(found.setdefault(node, dim) != dim for node, dim in zip(operands, dims, strict=True)):
        return None
    return {node: dim for node, dim in found.items() if dim is not None}


def given_of(dims: Dims, cut: Placement) -> dict[fx.Node, Placement]:
    return {node: cut.moved(dim) for node, dim in dims.inputs.items()}


def _narrows(site: Site, node: fx.Node) -> bool:
    before, after = node.meta["val"], site.node.meta["val"]
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return torch.promote_types(before.dtype, after.dtype) != after.dtype
