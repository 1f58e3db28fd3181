"""How probable each target is, and whether it is the most probable class, on logits cut over the vocabulary.

    log P(t) = z[t] − max z − log Σ exp(z − max z)        top: z[t] = max z, and no class before t has as much

As the loss does, ranks exchange per token max z, then sums: the target's logit, Σ exp, and the number of classes
before the target that have the maximum. Logits are never gathered. Padding columns take no part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from passes.ops.axis import AxisHandle, widened
from passes.ops.collectives import all_reduce, part
from passes.types.types import Placement

Tensor = torch.Tensor
LOG_PROBABILITY, IS_TOP, COUNT = range(3)  # rows of the result of ``scores_of_targets``


def own_places(labels: Tensor) -> Tensor:
    """The place of every element of a batch tensor, among all of them."""
    return torch.arange(labels.numel(), device=labels.device).view(labels.shape)


def part_of_places(places: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    """This rank's part; padding belongs to no label."""
    return part(places, cut, axis.size, axis.rank, -1)


def scores_of_targets(
    logits: Tensor,
    target: Tensor,
    places: Tensor,
    labels: Tensor,
    axis: AxisHandle | None,
    class_dim: int,
    num_classes: int,
    ignored: int,
    is_counted_here: bool,
) -> Tensor:
    """[3, *labels] (float64) at the label that each target is: log P, whether it is the top, how often it was scored.

    logits [.., v/tp, ..] of this rank, or complete without an ``axis``; target, places [..] or with a class dim of
    one. Zeros for a label that is no target, or ignored; all zeros unless ``is_counted_here``, as other ranks add
    theirs.
    """
    rows = logits.movedim(class_dim, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    t, at, held = target.reshape(-1), places.reshape(-1), labels.reshape(-1)
    scored = (at >= 0) & (t == held[at.clamp(min=0)]) & (t >= 0) & (t < num_classes) & (t != ignored)
    log_probability, is_top = target_scores(rows, t, axis, num_classes)
    columns = torch.stack([log_probability, is_top.to(torch.float64), torch.ones_like(log_probability)])
    nowhere = held.numel()
    found = columns.new_zeros((3, nowhere + 1)).index_add_(1, torch.where(scored, at, nowhere), columns)
    found = found[:, :nowhere].reshape(3, *labels.shape)
    return found if is_counted_here else torch.zeros_like(found)


def target_scores(logits: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int) -> tuple[Tensor, Tensor]:
    """log P [n] (float64) and whether the target is the arg max [n]; logits [n, v/tp], target [n] global ids."""
    handle = AxisHandle("whole", 1, 0) if axis is None else axis
    columns = logits.shape[1]
    start = handle.rank * columns
    true_columns = max(0, min(columns, num_classes - start))
    z = widened(logits)
    lowest = torch.full_like(z[:, 0], -torch.inf)
    top = z[:, :true_columns].amax(1) if true_columns else lowest
    top = all_reduce(top, handle, "forward", dist.ReduceOp.MAX, owned=True)
    below = torch.full_like(z, -torch.inf)
    torch.sub(z[:, :true_columns], top.unsqueeze(1), out=below[:, :true_columns])
    mine = (target >= start) & (target < start + true_columns)
    picked = below.gather(1, (target - start).clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
    before = torch.arange(start, start + columns, device=z.device) < target.unsqueeze(1)
    num_ahead = ((below == 0) & before).sum(1)
    sums = [torch.where(mine, picked, 0.0).double(), below.exp_().sum(1, dtype=torch.float64), num_ahead.double()]
    picked, total, num_ahead = all_reduce(torch.stack(sums), handle, "forward", owned=True).unbind()
    return picked - total.log(), (picked == 0) & (num_ahead == 0)
