"""The sequences of a program: those of batch inputs, on their way to an embedding, and those that no input has.

    ids [b, t] → 1      pad, shifted, masked ids → 1      ids.view(b·t) → 0      x [b, t, f] of floats → 1

Weights may enter before float work over tokens begins: frozen embeddings of ids, with trained positions added, are a
sequence still. A value that a rule cannot follow (a shift along the sequence) keeps its sequence dims if it has as many
dims: shifted ids are a sequence still. Positions, which no input enters, have none: they follow their readers.

No input has the patches of an image or a video, or the frames that a convolution makes of sound:

    pixels [b, c, h, w] → conv → [b, n, d] → linear      n: the rows of the first product with a weight
    windows [b·w, n, d] → linear                         w: of each image the windows, one after the other

Every rank computes what leads to that product in full. The rows of a sample are all rows that do not hold the batch
(passes.partition.batch.mixing); the first dim of them is the sequence.
"""

from collections.abc import Iterator
from functools import cached_property

from torch import fx

from passes.partition.batch.mixing import batch_runs, follows_batch
from passes.partition.sequence.rules import options_over_cp
from passes.partition.typings.base import Site
from passes.program.ops.aten import has_gradient, is_pointwise, is_random, shape_of, tensors_of
from passes.program.ops.groups import MOVES, PRODUCTS
from passes.program.program import Program
from passes.program.weights import is_weight
from passes.rules.rule import RESULT, Role, operands_of
from passes.rules.table import rule_of
from passes.types.types import Placement, Run, V


def sequence_flow(program: Program) -> dict[fx.Node, set[Placement]]:
    """Node → cuts of its sequence; for values before float work begins."""
    flow: dict[fx.Node, set[Placement]] = {}
    for node in program.graph.graph.nodes:
        if node.name in program.inputs:
            flow[node] = of_input(node)
        elif node.op == "call_function" and not (node.meta.get("grad") and begins(node)) and not is_random(node):
            given = {n: flow[n] for n in node.all_input_nodes if flow.get(n)}
            if given:
                flow[node] = carried(node, given)
    return flow


def begins(node: fx.Node) -> bool:
    """Return whether float work over tokens may begin at an op: one with a gradient that computes more than element by
    element, or a product with a frozen weight. Frozen embeddings may still be joined to trained ones: virtual tokens.
    """
    if node.meta.get("grad"):
        return not is_pointwise(node.target) and node.target not in MOVES
    return node.target in PRODUCTS and any(map(is_weight, node.all_input_nodes))


def of_input(node: fx.Node) -> set[Placement]:
    """Return the dim behind the batch: of ids [b, t], and of floats [b, t, features]."""
    shape, dtype = shape_of(node), node.meta["val"].dtype
    dims = 3 if has_gradient(dtype) else 2
    return {V(1, shape[1])} if len(shape) == dims and shape[1] > 1 else set()


def carried(node: fx.Node, given: dict[fx.Node, set[Placement]]) -> set[Placement]:
    """Return the cuts of the result that follow from cuts of its operands: by a rule, or at the same dim."""
    if next(tensors_of(node), None) is None:
        return set()
    site = Site(node, 1, {n.name: cuts for n, cuts in given.items()})
    found: set[Placement] = set()
    for option in options_over_cp(site):
        pairs = zip(site.inputs, option.args, strict=True)
        if option.out.is_sharded and any(t.is_sharded and t in given.get(n, ()) for n, t in pairs):
            found.add(option.out)
    shape = shape_of(node)
    return found or {
        V(c.dim, shape[c.dim])
        for n, cuts in given.items()
        for c in cuts
        if len(shape_of(n)) == len(shape) and shape[c.dim] > 1
    }


def longest_sequence(program: Program) -> int:
    """Tokens of the longest sequence of an input; if none has one, of the first that a product finds; or 0."""
    inputs = [program.node(name) for name in program.inputs]
    if found := [cut.sizes[0] for node in inputs for cut in of_input(node)]:
        return max(found)
    inner = InnerSequences(program, 1)
    return next((cut.sizes[0] for n in program.graph.graph.nodes for cuts in inner.cuts(n).values() for cut in cuts), 0)


class InnerSequences:
    """``undivided``: the first product with such a sequence that has no equal chunks, and its size."""

    def __init__(self, program: Program, chunks: int) -> None:
        self.program, self.chunks = program, chunks
        self.undivided: tuple[fx.Node, int] | None = None

    def cuts(self, node: fx.Node) -> dict[fx.Node, set[Placement]]:
        """Return the operand of a product that holds a sequence, with its cut; none for other ops."""
        if node.target not in PRODUCTS or not any(map(is_weight, node.all_input_nodes)):
            return {}
        for operand in operands_of(node):
            for cut in self._sequences(node, operand) if operand in self._on_batch else ():
                if cut.sizes[0] % self.chunks == 0:
                    return {operand: {cut}}
                self.undivided = self.undivided or (node, cut.sizes[0])
        return {}

    def _sequences(self, node: fx.Node, operand: fx.Node) -> Iterator[Placement]:
        """Yield of each dim of rows of ``operand`` all of it, or the part of each sample behind the other."""
        rule, position = rule_of(node), operands_of(node).index(operand)
        runs = self._runs.get(operand)
        if rule is None or not runs or len(runs) > 1:
            return
        ((held, distance, count),) = runs
        for dim, size in enumerate(shape_of(operand)):
            factor = rule.sole(position, dim)
            if factor is not None and factor.role is Role.EACH and factor.at(RESULT) is not None and size > 1:
                if dim != held:
                    yield V(dim, size)
                elif distance > 1 and distance * count == size:
                    yield V(dim, *[distance] * count)

    @cached_property
    def _on_batch(self) -> set[fx.Node]:
        return follows_batch(self.program)

    @cached_property
    def _runs(self) -> dict[fx.Node, frozenset[Run] | None]:
        return batch_runs(self.program, self._on_batch)
