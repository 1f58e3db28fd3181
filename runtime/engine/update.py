"""The end of a step: the update and its report. Values that ranks share are summed in the all-reduce of the norm.

norm | loss | rows of each expert | notes of each rank      one all-reduce over all ranks
"""

import resource
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from passes.base import RankProgram
from planner.decisions import Decisions
from runtime.distributed.messages import Notes
from runtime.distributed.stopping import asks
from runtime.engine.build import Running
from runtime.optimizer.scalars import LearningRate
from runtime.pipeline.p2p import Waits
from runtime.report.step_report import Contents, StepClock, StepReport

_STATUS = Path("/proc/self/status")


class Update:
    """The updates of one rank. Owns the learning rate, and the notes of this rank for the others."""

    def __init__(self, running: Running, waits: Waits) -> None:
        self._waits, self._experts = waits, running.plan.experts
        self.rate = LearningRate(running.spec.optimizer)
        self._groups, self._optimizer, self._loss_scale = running.groups, running.optimizer, running.loss_scale
        self.turn_to(running.program, running.plan.to_run()[0])
        self._notes = Notes(running.plan.mesh, running.groups.rank, running.groups.device)

    def turn_to(self, program: RankProgram, decisions: Decisions) -> None:
        """Set the stages of the next step, which count rows of experts."""
        self._load, self._limits, self._layers = program.load, decisions.load().limits, decisions.experts.layers

    def take(self, batch: Mapping[str, Tensor], *, is_local: bool) -> None:
        """Note the batch of the next update, which must be the same on all ranks."""
        self._notes.take(batch, is_local=is_local)

    def run(self, step: int, loss: Tensor, clock: StepClock | None) -> StepReport:
        """Update and return the report. ``loss``: this rank's addend.

        Raises PlanError on every rank if batches differ, and then updates nothing; on a GPU, reading the report does.
        """
        rate, scale = self.rate.at(step), self._loss_scale.tensor
        is_on_cpu = self._groups.device.type == "cpu"
        own = (self._waits.usual(), *self._waits.newest(), peak_bytes(self._groups.device))
        notes = self._notes.here(asks(), own)
        rows, asked = self._noted()
        first = 1 + sum(map(len, rows))  # behind the loss
        kept_scale = scale.clone() if scale is not None and self._loss_scale.is_dynamic else scale
        result = self._optimizer.step(
            rate,
            grad_scale=1.0 if scale is None else scale,
            extra=[loss, *rows, *asked, notes],
            refused=self._notes.differ,
            asked=lambda sums: sums[first : first + sum(map(len, asked))],
        )
        check = partial(self._notes.check, step=step + 1)  # as the log counts
        if is_on_cpu and self._groups.mesh.world_size > 1:
            check(result.figures[-len(notes) :].tolist())
        self._loss_scale.update(result.found_inf)
        if clock is not None:
            clock.stop()
        slots = [layer.limit for layer in self._layers if layer.capacity]
        contents = Contents(
            layers=tuple((row.block, row.num_experts) for row in self._experts) if rows else (),
            dropping=sum(limit > 0 for limit in self._limits),
            drops=bool(slots) if all(slots) else None,
            num_notes=len(notes),
            places=self._notes.places,
            pipelines=self._notes.pipelines,
        )
        return StepReport(result.figures, rate, clock, contents, check, kept_scale)

    def _noted(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's addends to the rows of each expert (one of the tp ranks, which route alike, adds them) and
        to the counts of tokens for experts that may rest.
        """
        load = self._load
        if load is None:
            return [], []
        rows = [] if load.figures is None or not load.sizes else [load.figures]
        asked = [] if load.asked is None or not load.num_asked else [load.asked]
        return rows if self._groups.place["tp"] == 0 else list(map(torch.zeros_like, rows)), asked


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: of its GPU by PyTorch's allocator, otherwise resident. Does not wait for
    the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError):  # another system, where a child may count its parent's memory too
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
