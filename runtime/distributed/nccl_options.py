"""Options of NCCL communicators by their traffic. Other backends have none.

links           few thread blocks: a receive that is posted ahead spins until its message comes
tp, cp, ep      a high-priority stream: they start before compute that is queued already
of weights      the same: gathers of weights in shards (zero 3), on a group beside that of the gradients' sums
dp, tied        the default priority: gradients are reduced behind compute that does not wait for them
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from planner.mesh import OF_WEIGHTS

LINK_CTAS = 2  # thread blocks that a link may occupy, so that products beside it keep the other multiprocessors
_AWAITED = frozenset({"tp", "cp", "ep", "etp"})  # axes with results that the next kernel reads


def link_options(backend: str) -> Any:
    """Of a link between two stages; None if the backend has none. A group keeps the object, so each gets its own."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = LINK_CTAS
    return options


def axis_options(backend: str, axis: str) -> Any:
    """Of a group over ``axis``; None if the backend has none, or the default serves."""
    if backend != "nccl" or not (axis in _AWAITED or axis.endswith(OF_WEIGHTS)):
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
