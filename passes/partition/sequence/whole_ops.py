"""Ops that read whole sequences and make as much of them: each rank computes them for all tokens, and goes on with its
own.

    conv1d, cumsum, flip, fft      the result is cut again, where the sequence stood in the operand
    cat([x[:, 1:], 0], 1)          x[:, 1:] has no equal chunks: it stays whole, and what it is joined to is cut

Weights of such an op have partial gradients as all others: a rank's come from the results of its own tokens.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from passes.partition.sequence.facts import Types
from passes.partition.sequence.flow import carried
from passes.partition.sequence.refusals import not_divisible, reads_whole
from passes.program.ops.aten import shape_of
from passes.rules.flops import has_flops
from passes.types.types import Placement, V


def settle_whole(node: fx.Node, types: Types) -> None:
    """A result that every rank computes of all tokens: small, cut again, or whole. Raises PlanError for products of
    what cannot be cut.
    """
    places = _places_of_sequences(node, types)
    largest = max(places, key=lambda n: prod(shape_of(n)), default=None)
    if largest is None or 2 * prod(shape_of(node)) <= prod(shape_of(largest)):
        return  # a pooled sequence
    if not types.cuts_again:
        raise reads_whole(node, largest)
    place = _place(node, largest, places[largest])
    is_one = isinstance(node.meta["val"], torch.Tensor)
    cut = _cut_again(node, largest, place, types) if is_one else None
    if cut is not None:
        types.natives[node] = cut
        types.recut.add(node)
        types.lengths |= set(cut.sizes)
    elif has_flops(node) and largest in types.whole:
        raise not_divisible(node, shape_of(largest)[places[largest]], types.cp)
    else:
        types.whole[node] = place


def _places_of_sequences(node: fx.Node, types: Types) -> dict[fx.Node, int]:
    """Operands as large as a sequence, each with the dim where it has its tokens, or had them."""
    places = {n: types.of(n).dim for n in node.all_input_nodes if types.of(n).is_sharded}
    return places | {n: types.whole[n] for n in node.all_input_nodes if n in types.whole}


def _place(node: fx.Node, read: fx.Node, place: int) -> int:
    """The dim of the result's tokens, of an operand with its tokens in ``place``: where a rule carries that dim, or the
    same one.
    """
    cuts = carried(node, {read: {V(place, shape_of(read)[place])}})
    return min((cut.dim for cut in cuts), default=min(place, len(shape_of(node)) - 1))


def _cut_again(node: fx.Node, read: fx.Node, place: int, types: Types) -> Placement | None:
    """As ``read`` is, if the result has its tokens where they were; else in equal chunks, if there are any."""
    size, before = shape_of(node)[place], types.of(read)
    if before.is_sharded and (before.dim, shape_of(read)[before.dim]) == (place, size):
        return before
    return V(place, size) if size > 1 and size % types.chunks == 0 else None
