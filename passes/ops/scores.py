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
    rows = rows_of(logits.detach(), class_dim)
    t, at, scored = looked_up(target, places, labels, num_classes, ignored)
    log_probability, is_top = target_scores(rows, t, axis, num_classes)
    columns = torch.stack([log_probability, is_top.to(torch.float64), torch.ones_like(log_probability)])
    found = at_labels(columns, at, scored, labels)
    return found if is_counted_here else torch.zeros_like(found)


def rows_of(logits: Tensor, class_dim: int) -> Tensor:
    """[n, v]: one row for each target."""
    rows = logits.movedim(class_dim, -1)
    return rows.reshape(-1, rows.shape[-1])


def looked_up(
    target: Tensor, places: Tensor, labels: Tensor, num_classes: int, ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[n] each: the target, the place of its label, and whether it is scored."""
    t, at, held = target.reshape(-1), places.reshape(-1), labels.reshape(-1)
    return t, at, (at >= 0) & (t == held[at.clamp(min=0)]) & (t >= 0) & (t < num_classes) & (t != ignored)


def at_labels(columns: Tensor, at: Tensor, scored: Tensor, labels: Tensor) -> Tensor:
    """[k, *labels]: the sum of ``columns`` [k, n] at each label; zeros where nothing is scored."""
    nowhere = labels.numel()
    found = columns.new_zeros((len(columns), nowhere + 1)).index_add_(1, torch.where(scored, at, nowhere), columns)
    return found[:, :nowhere].reshape(len(columns), *labels.shape)


def target_scores(logits: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int) -> tuple[Tensor, Tensor]:
    """log P [n] (float64) and whether the target is the arg max [n]; logits [n, v/tp], target [n] global ids."""
    below, _, mine, start = below_top(logits, target, axis, num_classes)
    columns = logits.shape[1]
    picked = picked_of(below, target, mine, start)
    before = torch.arange(start, start + columns, device=below.device) < target.unsqueeze(1)
    num_ahead = ((below == 0) & before).sum(1)
    sums = [picked, below.exp_().sum(1, dtype=torch.float64), num_ahead.double()]
    picked, total, num_ahead = all_reduce(torch.stack(sums), _handle(axis), "forward", owned=True).unbind()
    return picked - total.log(), (picked == 0) & (num_ahead == 0)


def log_probabilities(
    logits: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int
) -> tuple[Tensor, Tensor]:
    """log P [n] (float64), and log Σ exp z [n] in the dtype of the sums; logits [n, v/tp], target [n] global ids."""
    below, top, mine, start = below_top(logits, target, axis, num_classes)
    sums = [picked_of(below, target, mine, start), below.exp_().sum(1, dtype=torch.float64)]
    picked, total = all_reduce(torch.stack(sums), _handle(axis), "forward", owned=True).unbind()
    return picked - total.log(), top + total.log().to(top.dtype)


def below_top(
    logits: Tensor, target: Tensor, axis: AxisHandle | None, num_classes: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """z − max z [n, v/tp], −inf in padding; max z [n]; whether this rank has the target's class [n]; the first class of
    this rank.
    """
    handle, columns = _handle(axis), logits.shape[1]
    start, true_columns = own_classes(columns, handle, num_classes)
    z = widened(logits)
    lowest = torch.full_like(z[:, 0], -torch.inf)
    top = z[:, :true_columns].amax(1) if true_columns else lowest
    top = all_reduce(top, handle, "forward", dist.ReduceOp.MAX, owned=True)
    below = torch.full_like(z, -torch.inf)
    torch.sub(z[:, :true_columns], top.unsqueeze(1), out=below[:, :true_columns])
    return below, top, (target >= start) & (target < start + true_columns), start


def own_classes(columns: int, axis: AxisHandle | None, num_classes: int) -> tuple[int, int]:
    """The first class of this rank, and how many of its columns are no padding."""
    start = _handle(axis).rank * columns
    return start, max(0, min(columns, num_classes - start))


def picked_of(below: Tensor, target: Tensor, mine: Tensor, start: int) -> Tensor:
    """The value at the target's class [n] (float64); 0 on other ranks."""
    picked = below.gather(1, (target - start).clamp(0, below.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(mine, picked, 0.0).double()


def _handle(axis: AxisHandle | None) -> AxisHandle:
    return AxisHandle("whole", 1, 0) if axis is None else axis
