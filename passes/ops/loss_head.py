"""What the stage of a loss gives beside it: log-probabilities of labels, top classes, the logits of one position.

    log P(t) = z[t] − max z − log Σ exp(z − max z)        ∂ log P(t) / ∂z[v] = [v = t] − exp(z[v] − log Σ exp z)
    top      z[t] = max z, and no class before t has as much
    row      the row of logits that the loss compares with one label of each sequence; other ranks give zeros

Logits may be sharded over the vocabulary, and are never gathered, nor are probabilities saved. As the loss does, ranks
exchange per token max z, then sums: the target's logit, Σ exp, and for ``top`` the number of classes before the target
that have the maximum. The backward exchanges nothing: each rank computes the gradient of its own classes. Of a row
[micro, v] all columns are gathered. Padding columns take no part.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import ALONE, AxisHandle, all_gather_single, has_values, own_part, widened
from passes.ops.collectives import all_reduce, note, part
from passes.ops.random_state import RandomState
from passes.types.types import Placement

LOG_P, SCORES, ROW = "log_p", "scores", "row"
LOG_PROBABILITY, IS_TOP, COUNT = range(3)  # rows of scores


class Wanted:
    """Which labels the next forwards are asked for. ``places`` [microbatches of the global batch, micro]: set before
    they run, of each sequence a place among the elements of its microbatch's labels."""

    def __init__(self, random: RandomState) -> None:
        self._random = random
        self.places: Tensor | None = None

    def of_microbatch(self) -> Tensor:
        assert self.places is not None, "no places are set"
        return self.places[self._random.microbatch]

    def __repr__(self) -> str:
        return "wanted"


def loss_head(
    logits: Tensor,
    target: Tensor,
    places: Tensor,
    labels: Tensor,
    axis: AxisHandle | None,
    classes: tuple[int, int, int],
    want: str,
    is_counted_here: bool,
    wanted: Wanted | None = None,
) -> Tensor:
    """At the label that each target is, or of the labels that are ``wanted``:

        log_p   [*labels] (float64)           log P, with a gradient
        scores  [3, *labels] (float64)        log P, whether it is the top, how often it was scored
        row     [micro, num_classes + 1]      the row of each sequence without padding, and how often it was found

    logits [.., v/tp, ..] of this rank, or complete without an ``axis``; target, places [..] or with a class dim of
    one: of the label that each row of logits is compared with. ``classes``: their dim, their number, and the ignored
    one. Zeros for a label that is no target, or ignored, or with its row on another rank; no counts (and no scores)
    unless ``is_counted_here``, as other ranks have the same.
    """
    if want == ROW:
        assert wanted is not None
        return _next_rows(logits, places, wanted, axis, classes, is_counted_here)
    t, at, scored = _looked_up(target, places, labels, classes)
    rows = _rows_of(logits, classes[0])
    if want == LOG_P:
        return _at_labels(_LogProbs.apply(rows, t, axis, classes[1]).unsqueeze(0), at, scored, labels)[0]
    log_p, _, is_top = log_probabilities(rows.detach(), t, axis, classes[1], top=True)
    found = _at_labels(torch.stack([log_p, is_top.double(), torch.ones_like(log_p)]), at, scored, labels)
    return found if is_counted_here else torch.zeros_like(found)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int) -> Tensor:
        log_p, log_total = log_probabilities(rows, target, axis, num_classes)
        ctx.axis, ctx.num_classes = axis, num_classes
        ctx.save_for_backward(rows, target, log_total)
        return log_p

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, target, log_total = ctx.saved_tensors
        start, true_columns = own_part(rows.shape[1], ctx.axis, ctx.num_classes)
        each = grads[0].to(log_total.dtype)
        found = (widened(rows) - log_total.unsqueeze(1)).exp_().mul_(-each.unsqueeze(1))
        found[:, true_columns:] = 0.0
        mine = (target >= start) & (target < start + true_columns)
        column = (target - start).clamp(0, rows.shape[1] - 1).unsqueeze(1)
        found.scatter_add_(1, column, torch.where(mine, each, 0.0).unsqueeze(1))
        return found.to(rows.dtype), None, None, None


def log_probabilities(
    logits: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int, *, top: bool = False
) -> tuple[Tensor, ...]:
    """Return log P [n] (float64), log Σ exp z [n] in the dtype of the sums, and with ``top`` whether the target is the
    arg max [n]; logits [n, v/tp], target [n] global ids."""
    handle, columns = axis or ALONE, logits.shape[1]
    start, true_columns = own_part(columns, axis, num_classes)
    z = widened(logits)
    highest = z[:, :true_columns].amax(1) if true_columns else torch.full_like(z[:, 0], -torch.inf)
    highest = all_reduce(highest, handle, "forward", dist.ReduceOp.MAX, owned=True)
    below = torch.full_like(z, -torch.inf)  # z − max z, −inf in padding
    torch.sub(z[:, :true_columns], highest.unsqueeze(1), out=below[:, :true_columns])
    mine = (target >= start) & (target < start + true_columns)
    picked = below.gather(1, (target - start).clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
    sums = [torch.where(mine, picked, 0.0).double()]
    if top:
        before = torch.arange(start, start + columns, device=z.device) < target.unsqueeze(1)
        sums.append(((below == 0) & before).sum(1).double())
    sums.append(below.exp_().sum(1, dtype=torch.float64))
    picked, *ahead, total = all_reduce(torch.stack(sums), handle, "forward", owned=True).unbind()
    is_top = [(picked == 0) & (num == 0) for num in ahead]
    return picked - total.log(), highest + total.log().to(highest.dtype), *is_top


# ---- labels and their places


def own_places(labels: Tensor) -> Tensor:
    """Return the place of every element of a batch tensor, among all of them."""
    return torch.arange(labels.numel(), device=labels.device).view(labels.shape)


def part_of_places(places: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    """Return this rank's part; padding belongs to no label."""
    return part(places, cut, axis.size, axis.rank, -1)


def _rows_of(logits: Tensor, class_dim: int) -> Tensor:
    """Return [n, v]: one row for each target."""
    rows = logits.movedim(class_dim, -1)
    return rows.reshape(-1, rows.shape[-1])


def _looked_up(
    target: Tensor, places: Tensor, labels: Tensor, classes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [n] each: the target, the place of its label, and whether it is scored."""
    _, num_classes, ignored = classes
    t, at, held = target.reshape(-1), places.reshape(-1), labels.reshape(-1)
    return t, at, (at >= 0) & (t == held[at.clamp(min=0)]) & (t >= 0) & (t < num_classes) & (t != ignored)


def _at_labels(columns: Tensor, at: Tensor, scored: Tensor, labels: Tensor) -> Tensor:
    """Return [k, *labels]: the sum of ``columns`` [k, n] at each label; zeros where nothing is scored."""
    nowhere = labels.numel()
    found = columns.new_zeros((len(columns), nowhere + 1)).index_add_(1, torch.where(scored, at, nowhere), columns)
    return found[:, :nowhere].reshape(len(columns), *labels.shape)


# ---- the logits of one position


def _next_rows(
    logits: Tensor, places: Tensor, wanted: Wanted, axis: AxisHandle | None, classes: Any, is_counted_here: bool
) -> Tensor:
    rows = widened(_rows_of(logits, classes[0]))
    is_wanted = wanted.of_microbatch().unsqueeze(1) == places.reshape(1, -1)
    found = is_wanted.sum(1)
    own = torch.where(found.unsqueeze(1) > 0, rows[is_wanted.to(torch.uint8).argmax(1)], 0.0)
    return _counted(own, found if is_counted_here else torch.zeros_like(found), axis, classes[1])


def last_row(
    logits: Tensor, dtype: torch.dtype, axis: AxisHandle | None, num_classes: int, is_counted_here: bool
) -> Tensor:
    """Return [micro, num_classes + 1], as a row of ``loss_head``, from logits [.., v/tp] of one position. ``dtype``: in
    which the loss reads them."""
    rows = widened(logits.reshape(-1, logits.shape[-1]).to(dtype))
    return _counted(rows, rows.new_full((len(rows),), float(is_counted_here)), axis, num_classes)


def _counted(own: Tensor, counts: Tensor, axis: AxisHandle | None, num_classes: int) -> Tensor:
    """Return the columns of all ranks, one rank's behind another's, without padding; then how often a row was found."""
    whole = own
    if axis is not None:
        note(axis, "all_gather", "forward", own, axis.size)
        parts = own.new_empty((axis.size, *own.shape))
        if has_values(own):
            all_gather_single(parts.view(-1), own.contiguous().view(-1), group=axis.group)
        whole = parts.movedim(0, 1).reshape(len(own), -1)
    return torch.cat([whole[:, :num_classes], counts.unsqueeze(1).to(whole.dtype)], 1)
