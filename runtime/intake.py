"""From the user's batch to the inputs of a step: checks, microbatches of this rank, counts for losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import Store

from passes.stage_module import RankProgram
from runtime.data.batches import BatchLayout
from runtime.data.denominators import denominators
from runtime.data.first_batch import check_first_batch, check_here
from runtime.distributed.groups import Groups
from runtime.pipeline.executor import Step


@dataclass
class FirstBatch:
    """``store``: over which all ranks check their first batch, until they have."""

    store: Store | None


class Intake:
    """Of one length and number of sequences. ``first``: the same for all of an engine."""

    def __init__(self, program: RankProgram, layout: BatchLayout, groups: Groups, first: FirstBatch) -> None:
        self._program, self._layout, self._groups, self._first = program, layout, groups, first

    def check(self, batch: Mapping[str, Tensor], *, local: bool) -> None:
        """Raises PlanError if the batch is not the plan's; the first time on every rank."""
        store, self._first.store = self._first.store, None
        groups = self._groups
        if store is None:
            check_here(self._layout, batch, groups.rank, groups.mesh.world_size, local=local)
        else:
            ranks = (groups.mesh.world_size, groups.rank, groups.timeout)
            check_first_batch(self._layout, batch, store, *ranks, local=local)

    def step(
        self,
        batch: Mapping[str, Tensor],
        index: int,
        scale: Tensor | None,
        *,
        local: bool,
        counts: Sequence[Tensor] | None = None,
    ) -> Step:
        """The step with this index, of a batch that was checked. ``scale``: of the loss. ``counts``: its denominators
        if they are not the batch's own."""
        layout, groups = self._layout, self._groups
        read = dict.fromkeys(name for stage in self._program.stages for name in stage.inputs)
        microbatches = layout.microbatches(batch, read, groups.device, local=local)
        if counts is None:
            counts = denominators(self._program, layout, batch, groups, local=local)
        return Step(index, microbatches, layout.first_microbatch, counts, scale)
