"""Sequences that no input has: the patches of an image or a video, the frames that a convolution makes of sound.

    pixels [b, c, h, w] → conv → [b, n, d] → linear      n: the rows of the first product with a weight
    windows [b·w, n, d] → linear                         w: of each image the windows, one after the other

Every rank computes what leads to that product in full. The rows of a sample are all rows that do not hold the batch
(passes.partition.batch.flow); the first dim of them is the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from torch import fx

from passes.partition.batch.flow import batch_runs, follows_batch
from passes.partition.sequence.flow import of_input
from passes.partition.sequence.refusals import not_divisible
from passes.program.ops.aten import shape_of
from passes.program.ops.products import PRODUCTS
from passes.program.program import Program
from passes.program.weights import is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, Role
from passes.rules.table import rule_of
from passes.types.draw import Run
from passes.types.types import Placement, V


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
        """The operand of a product that holds a sequence, with its cut; none for other ops."""
        if node.target not in PRODUCTS or not any(map(is_weight, node.all_input_nodes)):
            return {}
        for operand in operands_of(node):
            for cut in self._sequences(node, operand) if operand in self._on_batch else ():
                if cut.sizes[0] % self.chunks == 0:
                    return {operand: {cut}}
                self.undivided = self.undivided or (node, cut.sizes[0])
        return {}

    def check_found(self, cp: int) -> None:
        """Raise PlanError if a sequence was found that does not divide."""
        if self.undivided is not None:
            raise not_divisible(*self.undivided, cp)

    def _sequences(self, node: fx.Node, operand: fx.Node) -> Iterator[Placement]:
        """Of each dim of rows of ``operand``: of all of it, or of the part of each sample behind the other."""
        rule, position = rule_of(node), operands_of(node).index(operand)
        runs = self._runs.get(operand)
        if rule is None or not runs or len(runs) > 1:
            return
        (batch,) = runs
        for dim, size in enumerate(shape_of(operand)):
            factor = rule.sole(position, dim)
            if factor is not None and factor.role is Role.EACH and factor.at(RESULT) is not None and size > 1:
                yield from _beside(batch, dim, size)

    @cached_property
    def _on_batch(self) -> set[fx.Node]:
        return follows_batch(self.program)

    @cached_property
    def _runs(self) -> dict[fx.Node, frozenset[Run] | None]:
        return batch_runs(self.program, self._on_batch)


def _beside(batch: Run, dim: int, size: int) -> Iterator[Placement]:
    held, distance, count = batch
    if dim != held:
        yield V(dim, size)
    elif distance > 1 and distance * count == size:
        yield V(dim, *[distance] * count)
