"""Attention over cp, of a rank's tokens: by heads, as attention in full. If keys are gathered, each rank of tp has at
least one key head.
"""

from __future__ import annotations

from collections.abc import Iterator

from passes.partition.options.attention import attention
from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.forms import Form
from passes.program.ops.sequence import causal_attention, gathered_attention


def of_own_keys(site: Site) -> Iterator[Option]:
    """(q, k, v, mask, cp, ..)."""
    yield from (option for option in attention(site) if option.form is Form.PARTS)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(attention, targets=(causal_attention,), gives={Form.PARTS, Form.SHARED_KEYS}),
    Covers(of_own_keys, targets=(gathered_attention,)),
)
