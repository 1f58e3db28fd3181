"""The logits of one position of each sequence, on logits cut over the vocabulary.

    wanted     of each sequence the place of one label: the element of the labels that the next token would be
    result     the row of logits that the loss compares with that label; ranks that do not have it give zeros

Only these rows are gathered over the vocabulary: of a microbatch [micro, v], and not of all its tokens.
"""

from __future__ import annotations

import torch

from passes.ops.axis import AxisHandle, has_values, widened
from passes.ops.collectives import note
from passes.ops.random_state import RandomState
from passes.ops.runs import all_gather_single
from passes.ops.scores import rows_of

Tensor = torch.Tensor


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


def next_rows(
    logits: Tensor,
    places: Tensor,
    wanted: Wanted,
    axis: AxisHandle | None,
    class_dim: int,
    num_classes: int,
    is_counted_here: bool,
) -> Tensor:
    """[micro, num_classes + 1]: the row of each sequence without padding columns, and how often it was found.

    logits [.., v/tp, ..] of this rank, or complete without an ``axis``; places [..] or with a class dim of one: of the
    label that each row of logits is compared with. Zeros for a sequence with its row on another rank, and zero counts
    unless ``is_counted_here``, as other ranks have the same rows.
    """
    rows = widened(rows_of(logits, class_dim))
    is_wanted = wanted.of_microbatch().unsqueeze(1) == places.reshape(1, -1)
    found = is_wanted.sum(1)
    own = torch.where(found.unsqueeze(1) > 0, rows[is_wanted.to(torch.uint8).argmax(1)], 0.0)
    whole = own if axis is None else gathered_columns(own, axis)
    counts = found if is_counted_here else torch.zeros_like(found)
    return torch.cat([whole[:, :num_classes], counts.unsqueeze(1).to(whole.dtype)], 1)


def gathered_columns(own: Tensor, axis: AxisHandle) -> Tensor:
    """The columns of all ranks, one rank's behind another's."""
    note(axis, "all_gather", "forward", own, axis.size)
    parts = own.new_empty((axis.size, *own.shape))
    if has_values(own):
        all_gather_single(parts.view(-1), own.contiguous().view(-1), group=axis.group)
    return parts.movedim(0, 1).reshape(len(own), -1)
