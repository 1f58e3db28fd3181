"""The interface of a rule: its input, its result, and the forms in which an op then computes.

A rule is a function from a Site (one graph node and the cuts under discussion for its inputs and its output) to the
Options it admits: the types its inputs must have, the type its output then has. All-I and all-R need no rule and are
always admitted (all-R except for a user's own backward that is not linear); a rule lists the sharded (V) and partial
(P) ways. Rules are asked again until no new cut turns up, so a rule need only look one step ahead: from its inputs'
candidates to its output, and from its output's back to its inputs.

Types that follow from the factors of a call's rule (passes.rules): the op itself runs on the tensors of a rank.

each by itself   every operand that has the factor is sharded there, and the result; the others are R
linear           P in some operands, P out; the other operands are R
own backward     y[.., i/tp, ..], .. = f(x[.., i/tp, ..], w): w, which every part reads in full, is R

A cut of a dim is carried as a whole, with its segments and its padding, where one factor is all of the dim.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import draws, ops_named, shape_of
from passes.program.ops.own_backward import OwnBackward, adds_up
from passes.rules.rule import RESULT, OpRule, Role, operands_of
from passes.rules.table import rule_of
from passes.types.types import I, P, Placement, R

NO_RULE = OpRule(())


class Form(Enum):
    """How a node computes under one typing: its lowering. Values depend on it, so there is no other name; the text is
    for messages alone. Most forms are the op itself on a rank's tensors; the others are rewritten (passes.localize).
    """

    # the same op on a rank's tensors
    WHOLE = "whole"  # all of it, on every rank
    PARTS = "parts"
    PARTIAL = "partial"  # partial sums in, partial sums out
    SUM = "sum of a part"  # over the cut dim: a partial sum
    COLUMN = "column"  # products: a label of the result is cut
    ROWS = "rows"  # that go to experts, or come back
    ROW = "row"  # … a label that is summed over: a partial sum
    # written sizes and bounds become local
    SIZES = "sizes"
    SPLIT = "split"
    SEGMENT = "segment"  # a slice along the cut dim
    STRIDED = "strided"  # … of every n-th element
    GROUPS = "groups"  # this rank's groups of channels
    # another op, or more than one
    MEAN = "mean of a part"  # over the cut dim: scaled to a partial sum
    VOCABULARY = "vocabulary"  # rows of an embedding
    CLASSES = "classes"  # columns of the logits of a loss
    OVER_RANKS = "over ranks"  # the ranks exchange statistics of each row of the cut dim
    PICKED = "picked"  # one element of the cut dim, which one rank holds
    SHARED_KEYS = "shared key heads"  # key heads are replicated, each rank picks those that its query heads read


@dataclass(frozen=True, slots=True)
class Option:
    """One admissible typing of a node: a type for each of ``Site.inputs``, in order, and for the output.

    ``whole`` says that every rank computes all of the node (its FLOPs are redundant). ``attends`` marks products of
    activations, with operands that a rank may pick out of a full tensor (the key heads that its query heads read).
    ``detour`` marks typings that are correct but seldom fast: statistics over sharded features, as of a norm, cost a
    collective each.
    """

    args: tuple[Placement, ...]
    out: Placement
    form: Form
    whole: bool = False
    attends: bool = False
    detour: bool = False


Rule = Callable[["Site"], Iterable[Option]]


@dataclass(frozen=True)
class Covers:
    """A rule, the ATen ops that it is for (``names``: "op" or "op.overload", with blanks between; or ``targets``), and
    the forms that it may give beside WHOLE and PARTIAL, which any op may be; nothing else is accepted of it."""

    rule: Rule
    names: str = ""
    targets: tuple[Any, ...] = ()
    gives: Set[Form] = frozenset({Form.PARTS})

    def ops(self) -> tuple[Any, ...]:
        """Return the targets of a captured graph's nodes."""
        return (*self.targets, *ops_named(self.names))


class Site:
    """A node under discussion: its tensor inputs (each once), shapes, and the candidate cuts of its values.

    ``tp``: ranks over which its value is typed, those of etp in the experts' domain. ``sizes``: of both axes, if they
    differ. ``vocabulary_multiple``: rows a rank of a padded vocabulary must be a multiple of. ``weights``: values that
    are computed of parameters alone. ``rules``: those of calls that were asked for before.
    """

    def __init__(
        self,
        node: fx.Node,
        tp: int,
        candidates: Mapping[str, Iterable[Placement]],
        vocabulary_multiple: int = 128,
        sizes: Mapping[str, int] | None = None,
        rules: dict[str, OpRule | None] | None = None,
    ) -> None:
        self.node, self.tp = node, tp
        self.args: Any = node.args
        self.sizes = sizes or {"tp": tp, "etp": tp}
        self.vocabulary_multiple = vocabulary_multiple
        self.inputs = tuple(node.all_input_nodes)
        self._candidates = candidates
        self._rules = {} if rules is None else rules

    @property
    def rule(self) -> OpRule:
        """The rule of the call; without factors if it has none."""
        if self.node.name not in self._rules:
            self._rules[self.node.name] = rule_of(self.node)
        return self._rules[self.node.name] or NO_RULE

    def shape(self, node: fx.Node | None = None) -> tuple[int, ...]:
        """Return the global shape of an input, or of the output; of a tuple-valued node the first tensor's."""
        return shape_of(node or self.node)

    def candidates(self, node: fx.Node | None = None) -> list[Placement]:
        """Return the cuts (V types) under discussion for an input, or for the output, in a fixed order."""
        return sorted(self._candidates.get((node or self.node).name, ()))

    def grad(self, node: fx.Node) -> bool:
        return bool(node.meta.get("grad"))

    def divides(self, size: int) -> bool:
        return size % self.tp == 0

    def option(
        self, out: Placement, given: Mapping[fx.Node, Placement], form: Form, *, attends: bool = False
    ) -> Option:
        """Inputs outside of ``given`` are R: the replicated inputs of a sharded op have partial gradients."""
        args = tuple(self.settle(n, given.get(n, R)) for n in self.inputs)
        return Option(args, self.settle(self.node, out), form, attends=attends)

    def settle(self, node: fx.Node, placement: Placement) -> Placement:
        """Return I for R where there is no gradient: without one they are the same thing."""
        return I if placement.kind == "R" and not self.grad(node) else placement

    def uniform(self) -> Iterator[Option]:
        """Yield the typings that every op admits: all inputs I, and (if a gradient flows) all R."""
        yield Option(tuple(I for _ in self.inputs), I, Form.WHOLE, whole=True)
        if self.grad(self.node) and adds_up(self.node):
            yield Option(tuple(self.settle(n, R) for n in self.inputs), R, Form.WHOLE, whole=True)

    def partial(self, linear_in: Iterable[fx.Node]) -> Option:
        """Return the option of partial sums in, partial sums out; the other inputs are factors (R)."""
        return self.option(P, dict.fromkeys(linear_in, P), Form.PARTIAL)


def whole(site: Site) -> Iterator[Option]:
    """Return the rule of a call for which there is no other way."""
    return iter(())


def aligned(out: Placement, out_shape: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    """The cut of a broadcast operand of ``shape`` when the result is cut as ``out``; R if it is broadcast there."""
    dim = out.dim - (len(out_shape) - len(shape))
    if dim < 0 or shape[dim] != out_shape[out.dim]:
        return R
    return out.moved(dim)


# ---- by the factors of the rule of a call


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
    """Return the dim of each operand that has one; None if a tensor stands there twice, cut in two ways."""
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
