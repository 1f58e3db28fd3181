"""embedding(W[v, h], ids[b, s]).

vocabulary   W cut by rows, possibly padded: ids out of a rank's range give zeros, the result is P
features     W cut by columns: the result is cut on its last dim (a bias table of [buckets, heads] by heads)
tokens       ids cut, W whole (R)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.by_factors import by_factors
from passes.partition.options.forms import Form
from passes.types.types import P, Placement, Segment, V, padded_vocabulary


def embedding(site: Site) -> Iterator[Option]:
    weight = site.node.args[0]
    assert isinstance(weight, fx.Node)
    rows, columns = site.shape(weight)
    if any(site.node.args[3:4]):
        return  # gradients scaled by how often an id occurs
    for cut in vocabulary_cuts(site, rows, 0):
        yield site.option(P, {weight: cut}, Form.VOCABULARY)
    yield from by_factors(site)
    if site.divides(columns):
        yield site.option(V(len(site.shape()) - 1, columns), {weight: V(1, columns)}, Form.PARTS)


def vocabulary_cuts(site: Site, rows: int, dim: int) -> list[Placement]:
    """A plain cut if the rows divide; else the padded one, unless padding is most of the table."""
    if site.divides(rows):
        return [Placement("V", dim, (Segment(rows),))]
    if rows > 16 * site.tp:
        padded = padded_vocabulary(rows, site.tp, site.vocabulary_multiple)
        return [Placement("V", dim, (Segment(rows),), padded - rows)]
    return []


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (Covers(embedding, "embedding", gives={Form.PARTS, Form.VOCABULARY}),)
