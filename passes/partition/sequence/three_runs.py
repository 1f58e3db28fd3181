"""The values of a program in three runs, which differ in the tokens of one document: op by op, as far as is asked.

    run 0    drawn values            run 1    other tokens of document 1            run 2    other tokens of document 2

Values that no token reaches (positions, masks, constants) are computed from the batch, weights are drawn. Floats that
are rows of tokens are drawn too, by the document of each row, so that no product of the model has to be computed. If
documents repeat, document 2 has the numbers of document 1 in run 0, small and positive, for recurrences and roots.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.program.known_values import computed
from passes.program.ops.aten import HALF, aten, has_gradient, shape_of, tensors_of
from passes.program.program import Program
from passes.program.walks import in_order
from passes.rules.flops import node_flops

Run = tuple[int, int, int]  # a dim, the distance of two tokens along it, and their number
Values = tuple[Any, Any, Any]

MOST_ELEMENTS, MOST_FLOPS = 1 << 27, 1 << 36  # of one call: attention of 405B on 272 tokens is 5 % of it
SMALL = 1 / 16
_KEPT = 8  # drawn values, for calls that read one value in turn, as those of an unrolled loop


class TooMuchError(Exception):
    """A call is too large for a trial."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Token by token along ``run``. ``homes`` [tokens]: the document that each reads, 0 for none. ``origin``: the op
    that moved them away from their own tokens."""

    run: Run
    homes: Tensor
    origin: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Pooled:
    """A value of both documents, and of no token. ``origin``: the op that pooled them."""

    origin: fx.Node


@dataclass(frozen=True, eq=False)
class HeldValues:
    """Anything else, by its values. ``is_mixed``: some element reads both documents. ``is_mean``: only because it reads
    pooled values, and no weight has read it since. ``rows``: the same, all elements of a row alike: masks forgotten."""

    origin: fx.Node
    values: Values
    rows: Rows | None = None
    is_mixed: bool = False
    is_mean: bool = False


State = Rows | Pooled | HeldValues


@dataclass
class ThreeRuns:
    """``batch``: by placeholder, of inputs that are no tokens. ``tensors``: of placeholders with values, buffers say.
    ``repeats``: whether document 2 repeats document 1 in run 0.

    ``states``: of all values that tokens reach, in the order of the graph.
    """

    program: Program
    batch: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    repeats: bool = False
    states: dict[fx.Node, State] = field(default_factory=dict)
    known: dict[fx.Node, Any] = field(default_factory=dict)
    _drawn: dict[fx.Node, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.program.graph.graph.nodes
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._compared = {node.args[1] for node in nodes if node.target in (aten.eq.Scalar, aten.ne.Scalar)}

    def of(self, node: fx.Node) -> Values:
        """Raise whatever an op raises on drawn values, and TooMuchError."""
        state = self.states.get(node)
        if state is None:
            return (self._alone(node),) * 3
        if isinstance(state, HeldValues):
            return state.values
        if node not in self._drawn:
            drawn = self._draw(node, state)
            self._drawn = dict([*self._drawn.items()][1 - _KEPT :]) | {node: drawn}
        return self._drawn[node]

    def called(self, node: fx.Node) -> Values:
        """Return the results of a call, computed from the values of its operands."""
        num_elements = sum(map(_numel, [node, *node.all_input_nodes]))
        if num_elements > MOST_ELEMENTS or node_flops(node) > MOST_FLOPS:
            raise TooMuchError
        given = {n: self.of(n) for n in node.all_input_nodes}
        first, second, third = (self._result(node, {n: x[run] for n, x in given.items()}) for run in range(3))
        return first, second, third

    def _result(self, node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
        torch.manual_seed(self._numbers[node])
        return computed(node, given.__getitem__)

    def _alone(self, node: fx.Node) -> Any:
        """Compute a value that no token reaches."""
        for each in in_order([node], self.known, lambda n: [x for x in n.all_input_nodes if x not in self.states]):
            self.known[each] = self._held(each) if each.op == "placeholder" else self.called(each)[0]
        return self.known[node]

    def _held(self, node: fx.Node) -> Tensor:
        for held in (self.batch, self.tensors, self.program.constants):
            if node.name in held:
                return held[node.name]
        return self._random(node, 1)[0]

    def _draw(self, node: fx.Node, state: Rows | Pooled) -> Values:
        value = node.meta["val"]
        is_drawn = isinstance(value, Tensor) and has_gradient(value.dtype)
        if not is_drawn and node.op == "call_function":
            return self.called(node)  # choices, comparisons: made of what was drawn
        first, second, third = (x.abs() * SMALL if self.repeats and is_drawn else x for x in self._random(node, 3))
        if isinstance(state, Pooled):
            return first, second, third
        first = _repeated(first, state) if self.repeats else first
        homes = spread(state.homes, state.run, shape_of(node))
        return first, torch.where(homes == 1, second, first), torch.where(homes == 2, third, first)

    def starts_alone(self, values: Values, rows: Rows) -> bool:
        """Return whether a result has for document 2 what it has for document 1, up to rounding."""
        x = values[0]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return True
        apart = (x.double() - _repeated(x, rows).double()).norm()
        return bool(apart <= (0.1 if x.dtype in HALF else 1e-3) * x.double().norm())

    def _random(self, node: fx.Node, count: int) -> list[Tensor]:
        """Draw numbers; ids are others than those that the model asks for, as the end of a document or padding."""
        if _numel(node) > MOST_ELEMENTS:
            raise TooMuchError
        value, generator = node.meta["val"], torch.Generator().manual_seed(self._numbers[node])
        shape, dtype = (count, *value.shape), value.dtype
        if has_gradient(dtype):
            wide = torch.promote_types(dtype, torch.float32)
            return list(torch.randn(shape, generator=generator, dtype=wide).to(dtype))
        tables = [n.all_input_nodes[0] for n in self._numbers if n.target is aten.embedding.default]
        num_ids = min([256, *(shape_of(table)[0] for table in tables)])  # that every table has
        ids = torch.tensor([n for n in range(num_ids) if n not in self._compared] or [0])
        return list(ids[torch.randint(len(ids), shape, generator=generator)].to(dtype))


def _repeated(x: Tensor, rows: Rows) -> Tensor:
    """Put the first rows of document 1 in the place of those of document 2."""
    dim, inner, size = rows.run
    one, two = ((rows.homes == n).nonzero()[:, 0] for n in (1, 2))
    count, places = min(len(one), len(two)), torch.arange(x.shape[dim])
    moves = torch.zeros(size, dtype=torch.int64).index_copy(0, two[:count], one[:count] - two[:count])
    return x.index_select(dim, places + inner * moves[places // inner % size])


def spread(homes: Tensor, run: Run, shape: tuple[int, ...]) -> Tensor:
    """Return the document of each element, to broadcast over a value of ``shape``."""
    dim, inner, size = run
    along = homes[torch.arange(shape[dim]) // inner % size]
    return along.view([-1 if d == dim else 1 for d in range(len(shape))])


def moved(first: Any, other: Any) -> list[Tensor]:
    """Return for each tensor the elements that differ between two runs; NaN and Inf may be anything."""
    leaves = zip(pytree.tree_leaves(first), pytree.tree_leaves(other), strict=True)
    return [_differ(a, b) for a, b in leaves if isinstance(a, Tensor)]


def _differ(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        return torch.ones(a.shape, dtype=torch.bool)
    lost = a.isnan() | b.isnan() | (a == torch.inf) | (b == torch.inf) if a.is_floating_point() else a != a
    return (a != b) | lost


def pure_runs(one: Tensor, two: Tensor, tokens: int) -> Iterator[tuple[Run, Tensor]]:
    """Yield each dim along which every token of a value reads one document, with the homes."""
    for dim, size in enumerate(one.shape):
        whole = {(1, size)} if size else set()
        parts = [(1, tokens), (size // tokens, tokens), *whole] if size % tokens == 0 else whole
        for inner, count in parts:
            first, second = (_along(x, dim, inner, count) for x in (one, two))
            if first.any() and second.any() and not (first & second).any():
                yield (dim, inner, count), first * 1 + second * 2
                break


def _along(x: Tensor, dim: int, inner: int, size: int) -> Tensor:
    return x.movedim(dim, 0).flatten(1).any(1).view(-1, size, inner).any(2).any(0)


def _numel(node: fx.Node) -> int:
    return sum(int(x.numel()) for x in tensors_of(node))
