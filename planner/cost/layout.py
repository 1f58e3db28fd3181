"""A layout, the choices that a search varies and a plan fixes, and the predicted seconds of its step.

The seconds of a step by cause, which sum to ``step_seconds``:

compute, recompute, tp_comm, cp_comm, ep_comm     of the busiest rank, for all its microbatches; of collectives that
                                                  overlap computation, the exposed time
pp_comm, pp_bubble      time that messages between stages add to the pipeline, and the rest of its run
dp_comm, optimizer      the end of a step: exposed reductions and all-gathers, and the update
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from passes.errors import require
from planner.cluster.cluster import Uncertainty
from planner.mesh import Mesh
from planner.pipeline.actions import Order, without_weights
from planner.pipeline.kinds import KINDS


@dataclass(frozen=True, slots=True)
class Layout:
    """The choices of a layout. ``micro``: sequences of a microbatch; ``num_microbatches``: of one dp rank in a step.
    ``schedule``: its kind; ``by_hand``: the order of each rank, for a schedule of no kind.

    ``recompute``: none, full or selective, for all blocks. ``sizes``: blocks of each stage. ``zero``: the ZeRO stage;
    ``reshards``: weights are freed after each use.
    """

    mesh: Mesh
    micro: int
    num_microbatches: int
    sequence_parallel: bool
    recompute: str
    schedule: str
    sizes: tuple[int, ...]
    zero: int = 1
    reshards: bool = True
    by_hand: tuple[Order, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether weight gradients are separate actions (W)."""
        return KINDS[self.schedule].waits if not self.by_hand else self.by_hand[0] != without_weights(self.by_hand[0])


PARTS = {  # field of CostPlan → its name in texts
    "compute": "compute",
    "recompute": "recompute",
    "tp_comm": "tp collectives",
    "cp_comm": "cp collectives",
    "ep_comm": "ep collectives",
    "pp_comm": "messages between stages",
    "pp_bubble": "bubble",
    "dp_comm": "dp collectives",
    "optimizer": "update",
}
OWN = 0.2  # share of an estimate's uncertainty that is independent of other layouts


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Estimated seconds of one step, by cause; ``step_seconds`` is their sum.

    ``flops``: FLOPs of products on one device in a step, without recomputation; ``peak``: FLOP/s in the device's data
    sheet for the dtype with most of them; 0: unknown. ``uncertain``: seconds by which a real step may be faster or
    slower, according to the cluster file.
    """

    step_seconds: float
    compute: float
    tp_comm: float = 0.0
    pp_comm: float = 0.0
    pp_bubble: float = 0.0
    dp_comm: float = 0.0
    ep_comm: float = 0.0
    optimizer: float = 0.0
    recompute: float = 0.0
    cp_comm: float = 0.0
    flops: float = 0.0
    peak: float = 0.0
    uncertain: float = 0.0

    def __post_init__(self) -> None:
        require(isfinite(self.step_seconds) and self.step_seconds >= 0, f"a step takes {self.step_seconds} seconds")

    @property
    def range(self) -> tuple[float, float]:
        """The expected least and most seconds of a step."""
        return max(0.0, self.step_seconds - self.uncertain), self.step_seconds + self.uncertain

    def with_range(self, uncertainty: Uncertainty) -> CostPlan:
        """Return the cost with its uncertainty. Errors of one kind of work have one direction, so they add up."""
        return replace(self, uncertain=sum(_fraction(part, uncertainty) * getattr(self, part) for part in PARTS))


def is_as_fast(one: CostPlan, other: CostPlan, uncertainty: Uncertainty) -> bool:
    """Whether the difference of two layouts is within its uncertainty. Errors of work that both do cancel, except for
    the share ``OWN``, which is independent.
    """
    unknown = sum(_fraction(part, uncertainty) * abs(getattr(one, part) - getattr(other, part)) for part in PARTS)
    return abs(one.step_seconds - other.step_seconds) <= unknown + OWN * min(one.uncertain, other.uncertain)


def _fraction(part: str, uncertainty: Uncertainty) -> float:
    return uncertainty.communication if part.endswith("_comm") else uncertainty.compute
