"""The cp placeholders of a program over one cp rank's tokens: over tp, another dim may be sharded.

gather_sequence, local_rows   cut on any dim but the sequence; linear
sum_over_ranks                cut anywhere; linear
gathered_attention            by heads, if each rank has at least one key head
causal_attention              by heads, as attention
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.graph.ops.sequence import (
    causal_attention,
    gather_sequence,
    gathered_attention,
    local_rows,
    sum_over_ranks,
)
from planner.placement.rules.attention import attention
from planner.placement.rules.base import Covers, Option, Site
from planner.placement.rules.forms import Form


def along_sequence(site: Site) -> Iterator[Option]:
    """(x, dim, cp): each rank of tp does it with its part of the features, or of the heads."""
    (x,) = site.inputs
    dim = int(site.node.args[1])  # pyright: ignore[reportArgumentType]
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n) if c.dim != dim}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    yield site.partial([x])


def summed(site: Site) -> Iterator[Option]:
    """(x, cp)."""
    (x,) = site.inputs
    for cut in sorted({*site.candidates(x), *site.candidates()}):
        yield site.option(cut, {x: cut}, Form.PARTS)
    yield site.partial([x])


def of_own_keys(site: Site) -> Iterator[Option]:
    """(q, k, v, mask, cp, ..)."""
    yield from (option for option in attention(site) if option.form is Form.PARTS)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(along_sequence, targets=(gather_sequence, local_rows)),
    Covers(summed, targets=(sum_over_ranks,)),
    Covers(attention, targets=(causal_attention,), gives={Form.PARTS, Form.SHARED_KEYS}),
    Covers(of_own_keys, targets=(gathered_attention,)),
)
