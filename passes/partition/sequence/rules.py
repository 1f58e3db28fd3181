"""The types that an op admits over cp: those of the rule table, and some that only sequence sharding needs.

    attention       queries and result sharded, keys and values full; or all of them in what lies before, as windows
    loss of rows    rows sharded: partial sums
    full            of fewer
    tril, triu      rows or columns sharded
    one token       the sum over ranks of it and zeros: partial sums
    cat             of a sequence and few rows that no rank cuts: those stay whole beside a rank's part of the other
    over_data       partial sums: the ranks of cp are among those over which it sums

A sequence is split into 2·cp chunks, and a rank holds two: a rule for 2·cp ranks holds for any two chunks, as no op
that a rule shards along a dim depends on the order of its elements.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from passes.partition.loss.kinds import MEAN, NONE, SUM
from passes.partition.typings.base import Form, Option, Site, aligned, each
from passes.partition.typings.table import rule_of
from passes.program.ops.aten import aten, is_random, named, packet_of, packets
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.ops.sequence import over_data
from passes.program.weights import is_weight
from passes.types.types import P, Placement, R, Segment

FORMS = {Form.WHOLE, Form.PARTS, Form.PARTIAL, Form.SUM, Form.MEAN, Form.COLUMN, Form.ROW, Form.SIZES, Form.SPLIT}
FORMS |= {Form.SEGMENT, Form.STRIDED}
PRODUCTS = {Form.COLUMN, Form.ROW}


def options_over_cp(site: Site) -> list[Option]:
    """Return every admissible typing of a node over cp; without any that cuts a weight of a product."""
    if site.node.target is over_data:
        return [Option((P,), R, Form.WHOLE)]
    found = dict.fromkeys(site.uniform())
    for rule in (rule_of(site.node), RULES.get(packet_of(site.node.target))):
        found |= dict.fromkeys(rule(site) if rule else ())
    forms = FORMS | {Form.PICKED} if site.node.target is aten.slice.Tensor else FORMS
    weights = [i for i, n in enumerate(site.inputs) if is_weight(n)]
    cuts_weights = {o for o in found if o.form in PRODUCTS and any(o.args[i].is_sharded for i in weights)}
    return [o for o in found if o.form in forms and o not in cuts_weights and _is_even(site, o)]


def _is_even(site: Site, option: Option) -> bool:
    """Return whether each sequence that is cut is cut in equal chunks; no mask is drawn for partial sums. Rows that
    every rank holds beside them are neither summed nor drawn for."""
    cuts = [t for t in (option.out, *option.args) if t.is_sharded]
    even = all(len({s for s in c.segments if s.sharded}) == 1 and not c.padding for c in cuts)
    once = option.out == P or is_random(site.node)
    if not even or (once and any(c.has_whole_segment for c in cuts)):
        return False
    return option.form is not Form.PARTIAL or (site.grad(site.node) and not is_random(site.node))


def attention(site: Site) -> Iterator[Option]:
    q, k, v = (n for n in site.args[:3] if isinstance(n, fx.Node))
    dim = len(site.shape()) - 2
    if q in (k, v) or len(site.shape(q)) != len(site.shape()):
        return
    is_causal = named(site.node)["is_causal"]
    if is_causal and site.shape(q)[dim] != site.shape(k)[dim]:
        return
    for cut in sorted({c for n in (None, q) for c in site.candidates(n) if c.dim <= dim}):
        if is_causal and cut.dim == dim and len(cut.segments) > 1:
            continue  # several sequences behind each other; the later ones attend to the earlier ones
        masks = {n: aligned(cut, site.shape(), site.shape(n)) for n in site.inputs if n not in (q, k, v)}
        if cut.dim == dim:
            yield site.option(cut, masks | {q: cut}, Form.PARTS, attends=True)
        elif all(site.shape(n)[: cut.dim + 1] == site.shape()[: cut.dim + 1] for n in (k, v)):
            yield site.option(cut, masks | {q: cut, k: cut, v: cut}, Form.PARTS)


def triangle(site: Site) -> Iterator[Option]:
    """tril(x), triu(x): rows or columns sharded, with places that a rank knows."""
    (x,) = site.inputs
    first = len(site.shape()) - 2
    for cut in sorted({c for n in (None, x) for c in site.candidates(n) if c.dim >= first and len(c.segments) == 1}):
        yield site.option(cut, {x: cut}, Form.PARTS)


def loss_of_rows(site: Site) -> Iterator[Option]:
    """cross_entropy_loss(logits [n, c, ..], target [n, ..]): any dim but that of the classes."""
    given = named(site.node)
    logits, target, reduction = given["self"], given["target"], given["reduction"]
    likely = site.shape(target) == site.shape(logits)  # each row has a probability for each class
    if logits is target or (len(site.shape(target)) != len(site.shape(logits)) - 1 and not likely):
        return
    for cut in (c for c in site.candidates(logits) if c.dim != 1):
        rows = cut.moved(max(0, cut.dim - 1))
        form = {NONE: Form.PARTS, MEAN: Form.MEAN if likely else Form.SUM, SUM: Form.SUM}[int(reduction)]
        yield site.option(P if reduction else rows, {logits: cut, target: cut if likely else rows}, form)


def one_token(site: Site) -> Iterator[Option]:
    """x[:, i:i + 1]: the first token, say; one rank has it."""
    x, dim, start, end, *step = site.args
    if end - start == 1 and not step and site.grad(site.node):
        for cut in (c for c in site.candidates(x) if c.dim == dim and len(c.segments) == 1):
            yield site.option(P, {x: cut}, Form.PICKED)


def joined(site: Site) -> Iterator[Option]:
    """cat([text, image], dim) of no equal chunks: rows that are not cut are whole segments."""
    operands, dim = named(site.node)["tensors"], named(site.node)["dim"] % len(site.shape())
    cuts = [next((c for c in site.candidates(n) if c.dim == dim), R) for n in operands]
    if any(c.is_sharded for c in cuts) and not site.divides(site.shape()[dim]):
        pairs = list(zip(operands, cuts, strict=True))
        rows = (c.segments or (Segment(site.shape(n)[dim], sharded=False),) for n, c in pairs)
        yield site.option(Placement("V", dim, tuple(s for of_one in rows for s in of_one)), dict(pairs), Form.PARTS)


RULES: dict[Any, Callable[[Site], Iterator[Option]]] = (
    packets("scaled_dot_product_attention", attention)
    | packets("tril triu", triangle)
    | packets("slice", one_token)
    | packets("cat", joined)
    | packets("full zeros ones", lambda site: each(site, Form.SIZES))  # as many as a rank holds
    | dict.fromkeys(CROSS_ENTROPIES.packets, loss_of_rows)
)
