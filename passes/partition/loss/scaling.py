"""Numbers and constants of a microbatch's graph that differ in the global batch's graph.

    ratio(v, w, …)     c with global value = c · v, elementwise      (of two captures with k times as many sequences)

If the second capture has the full global batch, its value is the result. If not, a value proportional to the number of
sequences, or inversely so, is extrapolated; any other is unknown.

Sums over tokens are in float32, if a model computes in half precision: shares of the loss are sums, and the count is
of the global batch. float16 ends at 65,504, and bfloat16 takes 1,000,003 tokens for 999,424.

    cross_entropy(x, t, sum)      → cross_entropy(x, t, none).to(float32).sum()
    x.sum(), x.mean()             → x.sum(dtype=float32), x.mean(dtype=float32)
    count.to(half)                → count.to(float32);  float32.to(half) → float32
    scalars made of these         → the same ops, in float32
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from passes.partition.batch.align_exports import TwoCaptures, is_number
from passes.partition.loss import kinds
from passes.program.known_values import Constants
from passes.program.ops.aten import HALF, aten, is_pointwise, packet_of
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.walks import last_of_header, operands, walk

CLOSE = 1e-9


class Scaling:
    """Owns the corrections: ``factors`` of constant nodes, ``numbers`` by (node, argument); and the unknown ones."""

    def __init__(self, captures: TwoCaptures, first: Constants, second: Constants, total: int) -> None:
        self.captures, self.first, self.second, self.total = captures, first, second, total
        self.factors: dict[fx.Node, float] = {}
        self.shifts: dict[fx.Node, float] = {}
        self.numbers: dict[tuple[fx.Node, int | str], float] = {}
        self.unknown: list[fx.Node] = []

    def constant(self, node: fx.Node) -> kinds.Kind:
        """Return the kind of a constant, once it is corrected."""
        other = self.captures.others.get(node)
        if other is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return kinds.whole if other is not None else kinds.unknown
        changed = self.captures.changed(node)
        if changed is None or len(changed) > 1 or other not in self.second.nodes:
            return kinds.unknown
        a, b = self.first.value(node), self.second.value(other)
        dim = next(iter(changed), None)
        kind = kinds.whole if dim is None else kinds.Kind(kinds.ROWS, dim)
        if a is None or b is None:
            return kind if dim is not None else kinds.unknown
        if dim is not None and all(t.dim() == 1 and t.tolist() == list(range(len(t))) for t in (a, b)):
            return kinds.Kind(kinds.ROWS, order=kinds.PLACES)
        if dim is not None:
            repeats = [1] * a.dim()
            repeats[dim] = b.shape[dim] // max(1, a.shape[dim])
            a = a.repeat(repeats)
        return kind if a.shape == b.shape and self._corrected(node, a, b) else kinds.unknown

    def _corrected(self, node: fx.Node, a: torch.Tensor, b: torch.Tensor) -> bool:
        if torch.equal(a, b):
            return True
        if a.dtype == torch.bool or a.is_complex():
            return False
        x, y = a.double().flatten(), b.double().flatten()
        ratio = next((w / v for v, w in zip(x.tolist(), y.tolist(), strict=True) if v), None)
        factor = None if ratio is None else self._at_total(1.0, ratio)
        exact = a.is_floating_point() or (factor is not None and factor == round(factor))
        if ratio is not None and factor is not None and exact and torch.allclose(x * ratio, y, rtol=1e-6, atol=0.0):
            self.factors[node] = factor
            return True
        if self.captures.times == self.total and bool((y - x == (y - x)[0]).all()):
            self.shifts[node] = float((y - x)[0])
            return True
        return False

    def _at_total(self, a: float, b: float) -> float | None:
        """Return the value of ``a`` in the graph of the global batch, if it is ``b`` in the second graph."""
        if self.captures.times == self.total:
            return b
        for power in (1, -1):
            if abs(b - a * self.captures.times**power) <= CLOSE * abs(b):
                return a * self.total**power
        return None

    def compare_numbers(self, graph: fx.Graph) -> None:
        """Note the numbers among the operands of calls that are others in the second graph."""
        for node in graph.nodes:
            other = self.captures.others.get(node)
            if other is None or node in self.first.nodes or other.target != node.target:
                continue
            for place, a, b in _numbers(node, other):
                if a == b or (a != a and b != b):
                    continue
                value = self._at_total(a, b)
                if value is None:
                    self.unknown.append(node)
                else:
                    self.numbers[node, place] = type(b)(value) if value == round(value) else value


def corrected(scaling: Scaling) -> list[tuple[fx.Node, fx.Node]]:
    """Give numbers and constants the value that they have in one process. Returns each constant with its new value."""
    for (node, place), number in scaling.numbers.items():
        if isinstance(place, int):
            node.update_arg(place, number)
        else:
            node.update_kwarg(place, number)
    found = [(node, _computed(node, aten.mul.Tensor, factor)) for node, factor in scaling.factors.items()]
    found += [(node, _computed(node, aten.add.Tensor, shift)) for node, shift in scaling.shifts.items()]
    for node, new in found:
        for reader in list(node.users):
            if reader is not new and reader not in scaling.first.nodes:
                reader.replace_input_with(node, new)
    return found


def _computed(node: fx.Node, op: Any, number: float) -> fx.Node:
    """Return ``node`` times, or plus, a number; behind all placeholders."""
    dtype = node.meta["val"].dtype
    with node.graph.inserting_after(last_of_header(node)):
        return kinds.call_like(node, op, (node, number if dtype.is_floating_point else round(number)))


def _numbers(node: fx.Node, other: fx.Node) -> Iterator[tuple[int | str, Any, Any]]:
    for place in numeric_places(node):
        a, b = (
            n.args[place] if isinstance(place, int) and place < len(n.args) else n.kwargs.get(str(place))
            for n in (node, other)
        )
        if is_number(a) and is_number(b):
            yield place, a, b


def numeric_places(node: fx.Node) -> Iterator[int | str]:
    """Yield the arguments of a call that are numbers to compute with: no sizes, no dims."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if str(argument.type) not in ("number", "Tensor", "float", "Optional[number]", "Optional[float]"):
            continue
        if position < len(node.args):
            if is_number(node.args[position]):
                yield position
        elif is_number(node.kwargs.get(argument.name)):
            yield argument.name


WIDE = torch.float32


def widen(graph: fx.Graph, ends: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Compute the half-precision scalars that lead to ``ends`` in float32; node → its replacement. Readers that need
    the old dtype get a cast. The old nodes stay, unread.
    """
    wide: dict[fx.Node, fx.Node] = {}
    leading = set(walk(ends, operands, into=_is_scalar))
    for node in [n for n in graph.nodes if n in leading and n.op == "call_function" and n.meta["val"].dtype in HALF]:
        with graph.inserting_after(node):
            new = _in_float32(node, wide)
        if new is not None:
            wide[node] = new
    for old, new in wide.items():
        readers = [reader for reader in old.users if reader not in wide and reader is not new]
        if readers:
            with graph.inserting_after(new):
                cast = kinds.call_like(old, aten.to.dtype, (new, old.meta["val"].dtype))
            for reader in readers:
                reader.replace_input_with(old, cast)
    return wide


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _in_float32(node: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node | None:
    if kinds.reduction_of(node):
        return _unreduced(node)
    if packet_of(node.target) in (aten.sum, aten.mean):
        return _wide_call(node, node.target, node.args, {**node.kwargs, "dtype": WIDE})
    if node.target is aten.to.dtype:
        source: Any = node.args[0]
        if source in wide or source.meta["val"].dtype == WIDE:
            return wide.get(source, source)
        return _wide_call(node, aten.to.dtype, (source, WIDE)) if source.op == "placeholder" else None
    if is_pointwise(node.target) and any(n in wide for n in node.all_input_nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: wide.get(n, n))  # pyright: ignore
        return _wide_call(node, node.target, args, kwargs)
    return None


def _unreduced(node: fx.Node) -> fx.Node | None:
    """The loss of each row, then their sum or mean in float32; None for a mean over rows that do not all count."""
    reduction = kinds.reduction_of(node)
    if reduction == kinds.MEAN and node.target in CROSS_ENTROPIES:
        return None
    args, kwargs, shape = kinds.unreduced(node)
    value = torch.empty(shape, dtype=node.meta["val"].dtype, device="meta")
    each = kinds.call_like(node, node.target, args, kwargs, value)
    with node.graph.inserting_after(each):
        op = aten.sum.default if reduction == kinds.SUM else aten.mean.default
        return _wide_call(node, op, (each,), {"dtype": WIDE})


def _wide_call(like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    return kinds.call_like(like, target, args, kwargs, torch.empty((), dtype=WIDE, device="meta"))
