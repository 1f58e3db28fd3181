"""The interface of a rule: its input, its result, and the forms in which an op then computes.

A rule is a function from a Site (one graph node and the cuts under discussion for its inputs and its output) to the
Options it admits: the types its inputs must have, the type its output then has. All-I and all-R need no rule and are
always admitted (all-R except for a user's own backward that is not linear); a rule lists the sharded (V) and partial
(P) ways. Rules are asked again until no new cut turns up, so a rule need only look one step ahead: from its inputs'
candidates to its output, and from its output's back to its inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx

from passes.program.ops.aten import ops_named, shape_of
from passes.program.ops.own_backward import adds_up
from passes.rules.rule import OpRule
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
        """Return an option with inputs outside of ``given`` as R: the replicated inputs of a sharded op have partial
        gradients."""
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
