"""Denominators of microbatch losses: counts over the full global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from passes.stage_module import RankProgram
from runtime.data.batches import BatchLayout
from runtime.distributed.groups import Groups

MAX_COUNTED = 64  # microbatches of a global batch that every rank counts alone


@torch.no_grad()
def denominators(
    program: RankProgram, layout: BatchLayout, batch: Mapping[str, Tensor], groups: Groups, *, local: bool
) -> list[Tensor]:
    """The denominator of each loss term of the global batch; the same on every rank.

    Each rank counts all of a small global batch, without any exchange. A larger one is summed over the world,
    one rank of each dp rank adding its counts: the communicator of dp is still busy with the updated parameters.
    """
    count, names = program.count_module, program.count_inputs
    if count is None:
        return []
    shared = local or layout.num_microbatches * groups.mesh.dp > MAX_COUNTED
    if shared:
        microbatches = layout.microbatches(batch, names, groups.device, local=local)
    else:
        microbatches = layout.all_microbatches(batch, names, groups.device)
    counts = [count(*(microbatch[name] for name in names)) for microbatch in microbatches]
    totals = torch.stack([torch.stack([c.to(torch.float64) for c in row]) for row in counts]).sum(0)
    if shared and groups.dp is not None:
        counts_here = all(groups.coordinate[axis] == 0 for axis in ("tp", "cp", "pp"))
        totals = totals if counts_here else torch.zeros_like(totals)
        dist.all_reduce(totals, group=groups.world)
    return list(totals)
