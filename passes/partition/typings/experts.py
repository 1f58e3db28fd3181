"""Rows on their way to experts and back: the border between values typed over tp and values typed over etp.

dispatch    rows replicated over tp, each rank sends its share: R → replicated over etp: R
give_back   each rank of etp has a part of every sum: P → each rank of tp has the rows that it sent: P

dispatch_tokens and combine likewise, of tokens: each tp rank has the sums of the rows that it sent. send_slots and
return_slots likewise, of slots. share: a weight that experts share, R → R; own_slices likewise.
"""

from collections.abc import Iterator

from passes.moe import exchange
from passes.partition.typings.base import Covers, Form, Option, Site, whole
from passes.types.types import I, P, Placement, R


def dispatch(site: Site) -> Iterator[Option]:
    """Type rows on their way: the gradient of a row is on the rank that sent it, and partial over those that got it."""
    rows, here = (_type(R, site, "tp"), _type(R, site, "etp")) if site.grad(site.node) else (I, I)
    yield Option((rows, *(I for _ in site.inputs[1:])), here, Form.ROWS)


def give_back(site: Site) -> Iterator[Option]:
    yield Option((_type(P, site, "etp"), *(I for _ in site.inputs[1:])), _type(P, site, "tp"), Form.ROWS)


def share(site: Site) -> Iterator[Option]:
    """Type a shared weight: each rank has the gradient of the rows of its own experts."""
    if site.grad(site.node):
        yield Option((_type(R, site, "tp"),), _type(R, site, "etp"), Form.WHOLE)
    else:
        yield Option((I,), I, Form.WHOLE)


def own_member(site: Site) -> Iterator[Option]:
    """Type the weights of all experts alike; with_gradient likewise."""
    for cut in dict.fromkeys(cut for node in (site.node, *site.inputs) for cut in site.candidates(node)):
        yield site.option(cut, dict.fromkeys(site.inputs, cut), Form.PARTS)


def join(site: Site) -> Iterator[Option]:
    """Join rows of several experts: sums of all of them, or of none, are partial."""
    yield site.partial(site.inputs)


def drop_rows(site: Site) -> Iterator[Option]:
    """Drop of the features of a row those that a rank has."""
    rows = site.inputs[0]
    for cut in dict.fromkeys((*site.candidates(), *site.candidates(rows))):
        yield site.option(cut, {rows: cut}, Form.PARTS)


def _type(placement: Placement, site: Site, axis: str) -> Placement:
    """Return the type; over one rank all types are one."""
    return placement if site.sizes[axis] > 1 else I


KNOWING = (  # routing counts and the order of rows: the same on all ranks of the axis
    exchange.count_experts,
    exchange.count_by_group,
    exchange.count_taken,
    exchange.meet,
    exchange.ends_of,
    exchange.ids_of,
    exchange.part,
    exchange.slots_of,
    exchange.name_rows,
)
COVERS = (
    Covers(whole, targets=KNOWING, gives=frozenset()),
    Covers(dispatch, targets=(exchange.dispatch, exchange.dispatch_tokens, exchange.send_slots), gives={Form.ROWS}),
    Covers(drop_rows, targets=(exchange.drop_rows,)),
    Covers(join, targets=(exchange.join,)),
    Covers(own_member, targets=(exchange.own_member, exchange.with_gradient)),
    Covers(share, targets=(exchange.share, exchange.own_slices), gives=frozenset()),
    Covers(give_back, targets=(exchange.give_back, exchange.combine, exchange.return_slots), gives={Form.ROWS}),
)
BORDERS = frozenset({exchange.share, exchange.own_slices, *exchange.MOVING, *exchange.OF_TOKENS, *exchange.OF_SLOTS})
