"""The exchanged routing counts of a layer, and the two exchanges of rows that use them.

    all rows by expert → this tp rank's share → ep: to the ranks of their experts → etp: to all holders of a part

and back; or, instead of rows that are copies of tokens, each token once to a rank, and sums back (passes.ops.tokens). A
share is the rows [r · n // tp, (r + 1) · n // tp): all tp ranks have the same rows, and each sends its own.

In between, the rows of each expert times its own matrix, expert by expert (as of passes.ops.linear):

    forward     y_e = x_e W_e                       rows [n, i] by expert, W [E, i, o] (or [E, o, i], ``transposed``)
    backward    gx_e = g_e W_eᵀ                     goes back to autograd
                gW_e += x_eᵀ g_e                    into its part of the buffer

By autograd the gradient of a stack is a stack: one matrix for each expert, joined, and then added to the buffer. If one
call multiplies all experts, one call makes that gradient too, which is then added as one tensor: that kernel writes in
the dtype of the rows, and cannot add. It does not wait for a W of the schedule.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops import experts
from passes.ops.axis import AxisHandle
from passes.ops.counts import ExpertLoad
from passes.ops.experts import Splits
from passes.ops.linear import places_of
from passes.ops.tokens import Leaving, TokenWay, collect, spread, way_of
from passes.ops.weight_gradients import SumPlace, WeightGradients, add_products, add_whole


@dataclass(frozen=True)
class Meeting:
    """One routing of one layer. ``to_experts``, ``to_parts``: splits over ep and over etp; ``counts``: [E / ep] of the
    rows that are here then. ``share``: half-open, of ``num_rows`` rows. ``tokens``: their way, if each goes once to a
    rank. ``pieces``: of rows that experts are reading, those of each expert that has not."""

    ep: AxisHandle
    etp: AxisHandle
    num_rows: int
    share: tuple[int, int]
    to_experts: Splits
    to_parts: Splits | None
    counts: Tensor
    tokens: TokenWay | None = None
    pieces: dict[Tensor, dict[int, Tensor]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each expert of this rank, on the host."""
        return (self.to_experts if self.to_parts is None else self.to_parts).sizes


def meet(
    counts: Tensor,
    num_rows: int,
    tp: AxisHandle,
    ep: AxisHandle,
    etp: AxisHandle,
    load: ExpertLoad,
    layer: int,
    token: Tensor | None = None,
    num_tokens: int = 0,
    nodes: int = 1,
) -> Meeting:
    """``counts`` [E]: rows of each expert, the same on all tp ranks. The host waits here, and only here.

    ``token`` [num_rows]: of each row, by expert, if tokens go once to a rank; ep spans ``nodes``.
    """
    load.note(layer, counts)
    ends = counts.cumsum(0)
    share = tp.rank * num_rows // tp.size, (tp.rank + 1) * num_rows // tp.size
    own = (ends.clamp(max=share[1]) - (ends - counts).clamp(min=share[0])).clamp(min=0)
    leaving = None if token is None else Leaving(token[slice(*share)], own, num_tokens, ep.size, nodes)
    to_experts, to_parts, figures = experts.splits_of_both(own, ep, etp, None if leaving is None else leaving.figures())
    here = to_experts.counts if to_parts is None else to_parts.counts
    way = None if leaving is None else way_of(leaving, to_experts, figures, ep)
    return Meeting(ep, etp, num_rows, share, to_experts, to_parts, here, way)


def dispatch(rows: Tensor, here: Meeting) -> Tensor:
    """Send all rows by expert [n, …] to the ranks of their experts: the rows of this rank's experts, by expert."""
    start, stop = here.share
    came = experts.dispatch(rows[start:stop], here.to_experts, here.ep)
    return came if here.to_parts is None else experts.spread_rows(came, here.to_parts, here.etp)


def give_back(rows: Tensor, here: Meeting) -> Tensor:
    """Send the results of rows back → [n, …]: this rank's share at its place, zeros at the others'."""
    whole = rows if here.to_parts is None else experts.gather_in(rows, here.to_parts, here.etp)
    own = experts.give_back(whole, here.to_experts, here.ep)
    start, stop = here.share
    if stop - start == here.num_rows:
        return own
    before, after = (own.new_zeros(n, *own.shape[1:]) for n in (start, here.num_rows - stop))
    return torch.cat([before, own, after])


def dispatch_tokens(tokens: Tensor, here: Meeting) -> Tensor:
    """Send all tokens [t, …], each once to a rank → the rows of this rank's experts, by expert."""
    assert here.tokens is not None
    came = spread(tokens, here.tokens, here.ep)
    return came if here.to_parts is None else experts.spread_rows(came, here.to_parts, here.etp)


def combine(rows: Tensor, here: Meeting, dtype: torch.dtype) -> Tensor:
    """Return the results of rows → [t, …]: of each token the sum of those that this tp rank sent. All that is sent is
    in ``dtype``, which may be narrower than the rows."""
    assert here.tokens is not None
    if here.to_parts is not None:
        rows = experts.gather_in(rows.to(dtype), here.to_parts, here.etp)
    return collect(rows, here.tokens, here.ep, dtype)


def grouped_mm(rows: Tensor, weights: Tensor, here: Meeting) -> Tensor:
    """Return the rows of each expert of this rank times its own matrix, weights [E / ep, i, o]."""
    if has_kernel(rows, weights):
        return of_groups(rows, weights, here)
    return torch.cat([x @ w for x, w in zip(rows.split(here.sizes), weights, strict=True)])


def of_groups(rows: Tensor, weights: Tensor, here: Meeting) -> Tensor:
    """Return the same in one call, which reads the ends of each expert's rows on the device."""
    return _OfGroups.apply(rows, weights, here)  # pyright: ignore[reportReturnType]


class _OfGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, here: Meeting) -> Tensor:
        ctx.here = here
        ctx.save_for_backward(rows, weights)
        return F.grouped_mm(rows.contiguous(), weights, offs=ends_of(here, torch.int32))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (rows, weights), (needs_rows, needs_weights, _) = ctx.saved_tensors, ctx.needs_input_grad
        of_rows = of_groups(grads[0], weights.transpose(1, 2), ctx.here) if needs_rows else None
        return of_rows, gradient_of_groups(rows, grads[0], ctx.here) if needs_weights else None, None


def grouped_linear(
    rows: Tensor, weights: Tensor, here: Meeting, transposed: bool, handle: WeightGradients | None
) -> Tensor:
    """Return rows of this rank's experts, by expert [n, i] → [n, o]. ``handle``: as of passes.ops.linear."""
    places = places_of(handle, (weights,)) if torch.is_grad_enabled() and rows.requires_grad else None
    if places is None:
        return grouped_mm(rows, _matrices(weights, transposed), here)
    return _Grouped.apply(rows, (weights,), here, transposed, places[0])  # pyright: ignore


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, held: Any, here: Meeting, transposed: bool, place: SumPlace | None) -> Tensor:
        ctx.weights, ctx.here, ctx.transposed, ctx.place = held[0], here, transposed, place
        ctx.set_materialize_grads(False)
        if place is not None:
            ctx.save_for_backward(rows)
        return grouped_mm(rows, _matrices(held[0], transposed), here)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, here, place = grads[0], ctx.here, ctx.place
        rows = ctx.saved_tensors[0].detach() if place is not None else None
        of_rows = None if grad is None else grouped_mm(grad, _matrices(ctx.weights, not ctx.transposed), here)
        if place is not None:
            _add(place, rows, grad, ctx.weights, ctx.transposed, here)
        return of_rows, None, None, None, None


def _matrices(weights: Tensor, transposed: bool) -> Tensor:
    return weights.transpose(1, 2) if transposed else weights


def _add(place: SumPlace, rows: Any, grad: Tensor | None, weights: Tensor, transposed: bool, here: Meeting) -> None:
    """Add the gradient of the stack to its buffer."""
    if grad is None:
        place.add_nothing()
        return
    left, right = (grad, rows) if transposed else (rows, grad)
    if has_kernel(rows, _matrices(weights, transposed)):
        place.add(add_whole, gradient_of_groups(left, right, here))
    else:
        place.add(add_products, [part.t() for part in left.split(here.sizes)], right.split(here.sizes))


def gradient_of_groups(left: Tensor, right: Tensor, here: Meeting) -> Tensor:
    """[E / ep, m, n]: of each expert its rows of ``left`` [rows, m], transposed, times those of ``right`` [rows, n].

    The transposed is a view: each expert begins at a row, thus at a multiple of 16 bytes, however many rows it has. The
    kernel sums over these rows, and need not write the matrix of an expert that has none.
    """
    made = F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends_of(here, torch.int32))
    return made.masked_fill_((here.counts == 0)[:, None, None], 0.0)


def has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether one call computes all experts: in bfloat16, matrices of either order, rows of 16 bytes or a multiple."""
    if rows.dtype != torch.bfloat16 or not len(rows) or not has_grouped_kernel(rows.device):
        return False
    is_aligned = all(size % 8 == 0 for size in (*weights.shape[1:], weights.storage_offset()))
    return is_aligned and (weights.is_contiguous() or weights.transpose(1, 2).is_contiguous())


def has_grouped_kernel(device: torch.device) -> bool:
    """Return whether it multiplies groups of rows in one call: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def part(rows: Tensor, here: Meeting, number: int) -> Tensor:
    """Return the rows of one expert of this rank.

    All experts' are cut at once: the backward then joins their gradients once, where each slice of its own would fill
    zeros for the rows of all others.
    """
    left = here.pieces.pop(rows, None)
    if left is None or number not in left:
        left = dict(enumerate(torch.unsafe_split_with_sizes(rows, here.sizes)))
    taken = left.pop(number)
    if left:  # else nothing holds the rows: a recomputation may free them
        here.pieces[rows] = left
    return taken


def own_slices(value: Tensor, dim: int, ep: AxisHandle) -> Tensor:
    """Take of [.., E, ..] the slices of this rank's experts [.., E / ep, ..]. The others' gradient is zero here."""
    number = value.shape[dim] // ep.size
    return value.narrow(dim, ep.rank * number, number)


def ends_of(here: Meeting, dtype: torch.dtype) -> Tensor:
    """Return the ends of the rows of each expert of this rank."""
    return here.counts.cumsum(0).to(dtype)


def ids_of(here: Meeting, num_rows: int) -> Tensor:
    """Return the expert of each row, counted from this rank's first."""
    return experts.owners(here.counts, sum(here.sizes))


SENDING = (dispatch, dispatch_tokens)
MOVING = (*SENDING, give_back, combine)
