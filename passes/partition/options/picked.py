"""gather(x, dim, index): beside what follows from its factors, x sharded along the dim that is indexed: one rank holds
the element that is picked, and the others give zeros."""

from __future__ import annotations

from collections.abc import Iterator

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.by_factors import by_factors
from passes.partition.options.forms import Form
from passes.program.ops.aten import named
from passes.types.types import P


def gather(site: Site) -> Iterator[Option]:
    yield from by_factors(site)
    given = named(site.node)
    x = given["self"]
    if x is given["index"] or not site.shape(x) or not site.grad(site.node):
        return
    dim = given["dim"] % len(site.shape(x))
    for cut in site.candidates(x):
        if cut.dim == dim and len(cut.segments) == 1:
            yield site.option(P, {x: cut}, Form.PICKED)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (Covers(gather, "gather", gives={Form.PARTS, Form.PICKED}),)
