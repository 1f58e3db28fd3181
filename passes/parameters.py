"""One rank's part of a parameter, and the ranks with which it sums gradients.

dp, edp     every rank has the gradient of its own microbatches: edp for experts, dp for all else; dp-cp if
            each also has only its own tokens of them
tp, etp     every rank has a partial gradient: placement R, or a replicated segment
embedding   several stages hold the parameter (a tied weight)
counted     of equal copies, over tp or etp or over stages, the first alone counts in the gradient norm
"""

from dataclasses import dataclass
from math import prod

import torch

from passes.moe.layers import ExpertPart
from passes.types.types import Placement


def axis_of(expert: ExpertPart | None) -> str:
    """Return the axis over which a parameter has its placement: experts with axes of their own are cut over etp."""
    return "tp" if expert is None else "etp"


@dataclass(frozen=True)
class LocalParameter:
    """A parameter on one rank of one stage: its user's dotted name, its placement, and the ranks that sum its
    gradients.

    ``expert``: its expert part, if experts have axes of their own: ``placement`` is then over etp. ``partial_over``:
    mesh groups with partial gradients of it at the end of a step (its ``axis`` for type R, "embedding" for a tied
    weight on several stages); they are summed there after the data-parallel reduction over ``reduced_over``.
    ``counted``: whether this rank counts the parameter in the global gradient norm (each logical element counts once).
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    global_shape: tuple[int, ...]
    partial_over: tuple[str, ...] = ()
    counted: bool = True
    tied_stages: tuple[int, ...] = ()  # stages that hold it, if more than one
    requires_grad: bool = True
    expert: ExpertPart | None = None
    data_axis: str = "dp"

    @property
    def axis(self) -> str:
        """The axis of its placement: "etp" for a parameter of experts with axes of their own, else "tp"."""
        return axis_of(self.expert)

    @property
    def reduced_over(self) -> str:
        """The ranks that hold the same part and run other tokens: "edp" for experts, or "dp" ("dp-cp" with a cp)."""
        return self.data_axis if self.expert is None else "edp"

    @property
    def has_whole_segment(self) -> bool:
        """Whether part of it is replicated on its axis, with partial gradients, beside sharded segments."""
        return self.placement.has_whole_segment and self.axis in self.partial_over

    def whole_runs(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of the local sharded dim that are replicated over its axis, of ``size``."""
        runs, start = [], 0
        for segment in self.placement.segments:
            stop = start + segment.local(size)
            if not segment.sharded:
                runs.append((start, stop))
            start = stop
        return tuple(runs)

    def num_whole_elements(self, size: int, stop: int) -> int:
        """How many of the first ``stop`` elements of the local tensor, flattened, every rank of its axis holds."""
        inner = prod(self.shape[self.placement.dim + 1 :])
        full, rest = divmod(stop, self.shape[self.placement.dim] * inner)
        return sum(
            (last - first) * inner * full + max(0, min(rest, last * inner) - first * inner)
            for first, last in self.whole_runs(size)
        )
