"""Tokens on their way to experts, each once to a rank, and the sums of their results on the way back.

    spread     tokens → those that a rank sends, each once to a rank → all-to-all → the rows of this rank's experts
    collect    rows → summed by the token that came → all-to-all → summed by the token that was sent

If ep spans nodes, tokens go once to each node, to the rank with the same place in it, and from there to the ranks of
the node: two all-to-alls, the first of which alone uses the links between nodes.

Of the rows (token, choice) themselves only places travel, once a layer: which of the tokens each row reads.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle, widened
from passes.ops.experts import Figures, Splits, exchanged, moved, owners


@dataclass(frozen=True, slots=True)
class Hop:
    """One all-to-all: ``chosen`` of the tokens that are here go to the ranks, ``sent`` to each; ``received`` come."""

    sent: list[int]
    received: list[int]
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class TokenWay:
    """The way of ``num_tokens`` tokens. ``places``: of each row of this rank's experts, by expert, the place of its
    token among those that came last."""

    hops: tuple[Hop, ...]
    places: Tensor
    num_tokens: int


def spread(tokens: Tensor, way: TokenWay, axis: AxisHandle) -> Tensor:
    """[num_tokens, …] → the rows of this rank's experts, by expert."""
    return moved(tokens, way, axis, _spread, _collect)


def collect(rows: Tensor, way: TokenWay, axis: AxisHandle, dtype: torch.dtype) -> Tensor:
    """Return the rows of this rank's experts → [num_tokens, …]: of each token the sum of its rows, of all ranks. Sums
    that are sent are rounded to ``dtype``, and gradients have it on their way too."""
    return moved(rows, way, axis, partial(_collect, dtype=dtype), partial(_spread, dtype=rows.dtype))


def _spread(tokens: Tensor, way: TokenWay, axis: AxisHandle, phase: str, dtype: torch.dtype | None = None) -> Tensor:
    for hop in way.hops:
        tokens = exchanged(tokens.index_select(0, hop.chosen), hop.sent, hop.received, axis, phase)
    return tokens.index_select(0, way.places).to(dtype or tokens.dtype)


def _collect(rows: Tensor, way: TokenWay, axis: AxisHandle, phase: str, dtype: torch.dtype | None = None) -> Tensor:
    came, places, dtype = rows, way.places, dtype or rows.dtype
    for hop in reversed(way.hops):
        summed = _summed(came, places, sum(hop.received), dtype)
        came, places = exchanged(summed, hop.received, hop.sent, axis, phase, back=True), hop.chosen
    return _summed(came, places, way.num_tokens, dtype)


def _summed(rows: Tensor, places: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return [size, …]: the sum of the rows of each place, rounded once, to ``dtype``. In one order on every device."""
    wide = widened(rows)
    total = wide.new_zeros(size, *rows.shape[1:])
    return total.index_put_((places,), wide, accumulate=True).to(dtype)


# ---- which tokens go where


class Leaving:
    """The tokens of this rank's rows. ``token`` [n]: of each row, by expert; ``counts`` [E]: rows of each expert.

    ``needed`` [ep, num_tokens]: whether a rank has experts of a token; ``num`` [ep]: of how many.
    """

    def __init__(self, token: Tensor, counts: Tensor, num_tokens: int, ep: int, nodes: int) -> None:
        self.ep, self.nodes, self.num_tokens = ep, nodes, num_tokens
        self.rank = owners(counts.view(ep, -1).sum(1), len(token))
        self.key = self.rank * num_tokens + token
        needed = torch.zeros(ep * num_tokens, dtype=torch.bool, device=token.device)
        needed.index_fill_(0, self.key, True)
        self.place, self.needed = needed.cumsum(0) - 1, needed.view(ep, num_tokens)
        self.num = self.needed.sum(1)

    @property
    def inner(self) -> int:
        """Ranks of ep in a node."""
        return self.ep // self.nodes

    @cached_property
    def by_node(self) -> Tensor:
        """[nodes, num_tokens]: whether a node has experts of a token."""
        return self.needed.view(self.nodes, self.inner, self.num_tokens).any(1)

    def figures(self) -> Tensor:
        """[ep, …]: what each rank has to know of them; the numbers for all ranks of its node if there are several."""
        if self.nodes == 1:
            return self.num[:, None]
        to_node = self.by_node.sum(1)[:, None].repeat_interleave(self.inner, 0)
        beside = self.num.view(self.nodes, 1, self.inner).expand(-1, self.inner, -1).reshape(self.ep, self.inner)
        return torch.cat([self.num[:, None], to_node, beside], 1)

    def places(self, splits: Splits, figures: Figures, axis: AxisHandle) -> Tensor:
        """Return for the rows of this rank's experts the places of their tokens among those from all ranks."""
        first = self.num.cumsum(0) - self.num
        own = (self.place[self.key] - first[self.rank]).to(torch.int32)
        there = exchanged(own, splits.sent, splits.received, axis, "forward")
        passed_on = figures.came[:, 0].view(self.nodes, self.inner).t()  # by the ranks of the node, in their order
        blocks = passed_on.reshape(-1)
        starts = (blocks.cumsum(0) - blocks).view(self.inner, self.nodes).t().reshape(-1)
        return (there + starts[owners(figures.rows, len(there))]).index_select(0, splits.order)


def way_of(leaving: Leaving, splits: Splits, figures: Figures, axis: AxisHandle) -> TokenWay:
    """``splits``: of the rows. ``figures``: those of ``leaving`` and of all ranks."""
    places = leaving.places(splits, figures, axis)
    hops = _direct(leaving, figures) if leaving.nodes == 1 else _by_node(leaving, figures, axis)
    return TokenWay(hops, places, leaving.num_tokens)


def _direct(leaving: Leaving, figures: Figures) -> tuple[Hop, ...]:
    sent, received = ([row[0] for row in rows] for rows in figures.here)
    return (Hop(sent, received, _true_places(leaving.needed, sum(sent))),)


def _by_node(leaving: Leaving, figures: Figures, axis: AxisHandle) -> tuple[Hop, ...]:
    """Send each token once to each node, then from there to the ranks of the node that have experts of it."""
    inner, ranks = leaving.inner, range(leaving.ep)
    node, place = divmod(axis.rank, inner)
    beside = [rank % inner == place for rank in ranks]  # of each node the rank with the same place
    sent, came = ([row[1] * is_beside for row, is_beside in zip(rows, beside, strict=True)] for rows in figures.here)
    chosen = _true_places(leaving.by_node, sum(sent))
    across = Hop(sent, came, chosen)
    to_node = owners(leaving.by_node.sum(1), len(chosen))
    needed = leaving.needed.view(leaving.nodes, inner, -1)[to_node, :, chosen].to(torch.uint8)
    needed = exchanged(needed, sent, came, axis, "forward")  # [tokens that came, inner]
    rows = figures.came_here
    passed = [sum(rows[s][2 + r % inner] for s in ranks if beside[s]) * (r // inner == node) for r in ranks]
    comes = [sum(rows[s][0] for s in ranks if s % inner == r % inner) * (r // inner == node) for r in ranks]
    return across, Hop(passed, comes, _true_places(needed.t() > 0, sum(passed)))


def _true_places(marks: Tensor, total: int) -> Tensor:
    """Return the column of each true element of a matrix, row by row; the host knows their number."""
    flat = marks.reshape(-1)
    found = torch.empty(total + 1, dtype=torch.int64, device=marks.device)  # the last for those that are not
    at = torch.where(flat, flat.cumsum(0) - 1, total)
    columns = torch.arange(flat.numel(), device=marks.device) % marks.shape[1]
    return found.scatter_(0, at, columns)[:total]
