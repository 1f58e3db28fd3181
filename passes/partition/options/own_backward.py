"""A user's Function with a backward of its own: cut along the dims over which it was shown to work part by part.

y[.., i/tp, ..], .. = f(x[.., i/tp, ..], w)        w, which every part reads in full, is R: its gradients add up
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.partition.options.base import Option, Site
from passes.partition.options.forms import Form
from passes.program.ops.own_backward import Cut, OwnBackward
from passes.types.types import Placement


def own_backward(site: Site) -> Iterator[Option]:
    """All outputs are cut alike (an item of a tuple takes the cut of the tuple)."""
    call, operands = site.node.target, site.node.args
    assert isinstance(call, OwnBackward)
    for cut in call.facts.cuts:
        places = _places(operands, cut)
        if places is None:
            continue
        found = {c for c in site.candidates() if c.dim == cut.dim}
        found |= {c.moved(cut.dim) for n, dim in places.items() for c in site.candidates(n) if c.dim == dim}
        for placement in sorted(found):
            if _bears(call, placement):
                given = {n: placement.moved(dim) for n, dim in places.items()}
                yield site.option(placement, given, Form.PARTS)


def _places(operands: tuple[object, ...], cut: Cut) -> dict[fx.Node, int] | None:
    """The dim along which each cut operand is cut; None if one tensor would have to be cut in two ways."""
    dims: dict[fx.Node, int | None] = {}
    for operand, dim in zip(operands, cut.inputs, strict=True):
        assert isinstance(operand, fx.Node)
        if dims.setdefault(operand, dim) != dim:
            return None
    return {node: dim for node, dim in dims.items() if dim is not None}


def _bears(call: OwnBackward, placement: Placement) -> bool:
    """Padding holds no data to run on; a replicated segment has partial sums as gradients."""
    return not placement.padding and (call.facts.linear or not placement.has_whole_segment)
