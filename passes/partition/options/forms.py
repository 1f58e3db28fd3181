"""How a node computes under one typing: the lowering of the node. Values depend on it, so there is no other name. Most
forms are the op itself on a rank's tensors; the others are rewritten (passes.localize).
"""

from __future__ import annotations

from enum import Enum


class Form(Enum):
    """The text is for messages alone."""

    # the same op on a rank's tensors
    WHOLE = "whole"  # all of it, on every rank
    PARTS = "parts"
    PARTIAL = "partial"  # partial sums in, partial sums out
    SUM = "sum of a part"  # over the cut dim: a partial sum
    COLUMN = "column"  # products: a label of the result is cut
    ROWS = "rows"  # that go to experts, or come back
    ROW = "row"  # … a label that is summed over: a partial sum
    # written sizes and bounds become local
    SIZES = "sizes"
    SPLIT = "split"
    SEGMENT = "segment"  # a slice along the cut dim
    STRIDED = "strided"  # … of every n-th element
    GROUPS = "groups"  # this rank's groups of channels
    # another op, or more than one
    MEAN = "mean of a part"  # over the cut dim: scaled to a partial sum
    VOCABULARY = "vocabulary"  # rows of an embedding
    CLASSES = "classes"  # columns of the logits of a loss
    OVER_RANKS = "over ranks"  # the ranks exchange statistics of each row of the cut dim
    PICKED = "picked"  # one element of the cut dim, which one rank holds
    SHARED_KEYS = "shared key heads"  # key heads are replicated, each rank picks those that its query heads read
