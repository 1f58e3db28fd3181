"""Products that sum over shared dims: linear, mm, bmm, matmul, einsum and the products of a user's own rule.

    a dim of the result    every operand that has it is sharded there, the others are R       column parallel, heads
    a summed dim           both operands are sharded there, the result is P                   row parallel

The weight of a column-parallel linear is sharded exactly as its output, segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.by_factors import Dims, dims_of_factors, given_of
from passes.partition.options.forms import Form
from passes.program.weights import is_weight
from passes.rules.rule import Role
from passes.types.types import P, Placement, Segment


def contraction(site: Site) -> Iterator[Option]:
    """Options of a two- or many-operand product."""
    attends = not any(is_weight(n) for n in site.inputs)
    for dims in dims_of_factors(site, Role.EACH):
        for cut in _cuts(site, dims):
            yield site.option(dims.of_result(cut), given_of(dims, cut), Form.COLUMN, attends=attends)
    for dims in dims_of_factors(site, Role.SUM):
        for cut in _cuts(site, dims):
            if cut.is_disjoint:
                yield site.option(P, given_of(dims, cut), Form.ROW, attends=attends)


def _cuts(site: Site, dims: Dims) -> list[Placement]:
    """Those under discussion; a dim of a weight is offered plainly too."""
    found = set(dims.candidates(site))
    for node, dim in dims.inputs.items():
        size = site.shape(node)[dim]
        if size and is_weight(node) and site.divides(size):
            found.add(Placement("V", 0, (Segment(size),)))
    return sorted(found)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (Covers(contraction, "linear mm bmm matmul einsum _grouped_mm", gives={Form.COLUMN, Form.ROW}),)
