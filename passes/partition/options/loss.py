"""cross_entropy_loss(logits, target): on logits cut over the vocabulary, never gathered.

vocabulary   logits cut on the class dim, padding masked; ranks exchange per token the maximum, then the sum of
             exponentials and the target's logit (Megatron-LM paper, section 3); the result is I

CTC is computed in full on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.embedding import vocabulary_cuts
from passes.partition.options.forms import Form
from passes.program.ops.ctc import CTC_LOSSES
from passes.program.ops.over_data import over_data
from passes.types.types import I, R


def cross_entropy(site: Site) -> Iterator[Option]:
    logits, target = site.node.args[:2]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    shape = site.shape(logits)
    weights = [n for n in site.inputs if n not in (logits, target)]  # one for each class, replicated
    if len(shape) != 2 or len(site.shape(target)) != 1 or any(site.grad(n) for n in weights):
        return
    cuts = {c for c in site.candidates(logits) if c.dim == 1 and len(c.segments) == 1}
    for cut in sorted(cuts | set(vocabulary_cuts(site, shape[1], 1))):
        yield Option(tuple(site.settle(n, cut if n is logits else R) for n in site.inputs), I, Form.CLASSES)


def by_sequence(site: Site) -> Iterator[Option]:
    """CTC: each sequence runs over all of its frames and classes, so no dim is cut over tp."""
    return iter(())


def summed_over_data(site: Site) -> Iterator[Option]:
    """Of a value that is the same on all ranks of tp: no other way."""
    return iter(())


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(cross_entropy, "cross_entropy_loss", gives={Form.CLASSES}),
    Covers(by_sequence, targets=(CTC_LOSSES,), gives=frozenset()),
    Covers(summed_over_data, targets=(over_data,), gives=frozenset()),
)
