"""Seconds of a step, by cause; the parts sum to ``step_seconds``.

compute, recompute, tp_comm, cp_comm, ep_comm     of the rank that works longest, all its microbatches; collectives
                                                  that overlap computation count as far as it waits for them
pp_comm, pp_bubble      time that messages between stages add to the pipeline, and the rest of its run
dp_comm, optimizer      the end of a step: sums and gathers that nothing hides, and the update
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from passes.errors import require


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Estimated seconds of one step, by cause; ``step_seconds`` is their total as the critical path sees it.

    ``flops``: operations of products that one device does in it, without recomputation; ``peak``: those that
    its data sheet allows it in a second, of the dtype that does most of them. 0: not known.
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

    def __post_init__(self) -> None:
        require(isfinite(self.step_seconds) and self.step_seconds >= 0, f"a step takes {self.step_seconds} seconds")
