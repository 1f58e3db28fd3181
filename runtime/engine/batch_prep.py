"""Prepares the inputs of a step from the user's batch: checks, rounds, this rank's microbatches, counts for losses.

An evaluation of any number of sequences runs in consecutive rounds of the planned number.

    10 sequences, 4 planned   →   0 1 2 3 | 4 5 6 7 | 8 9 · ·        · filler, which the loss does not count

The loss of the plan is a sum of shares over counts of the global batch: with the counts of all rounds, the rounds'
losses add up to the loss of all sequences in one process.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError
from runtime.data.batches import BatchChecks
from runtime.engine.build import Built
from runtime.pipeline.executor import Step

Batch = Mapping[str, Tensor]
MAX_COUNTED = 64  # most microbatches of a global batch that every rank counts by itself
UNCOUNTED = (-100, 0)  # values of a label, and of a mask, that do not count


class Intake:
    """The intake of batches of one length and size. ``checks``: shared by all intakes of an engine."""

    def __init__(self, built: Built, checks: BatchChecks) -> None:
        self._built, self._checks = built, checks

    def check(self, batch: Mapping[str, Tensor], *, local: bool) -> None:
        """Raise PlanError if the batch does not match the plan; for the first batch on every rank."""
        self._checks.check(self._built.layout, batch, local=local)

    def step(
        self,
        batch: Mapping[str, Tensor],
        index: int,
        scale: Tensor | None,
        *,
        local: bool,
        counts: Sequence[Tensor] | None = None,
    ) -> Step:
        """Return the step with this index, of a checked batch. ``scale``: of the loss. ``counts``: denominators of the
        loss; None: those of the batch.
        """
        layout = self._built.layout
        read = dict.fromkeys(name for stage in self._built.program.stages for name in stage.inputs)
        microbatches = layout.microbatches(batch, read, self._built.groups.device, local=local)
        if counts is None:
            counts = denominators(self._built, batch, local=local)
        return Step(index, microbatches, layout.first_microbatch, counts, scale)


@torch.no_grad()
def denominators(built: Built, batch: Mapping[str, Tensor], *, local: bool) -> list[Tensor]:
    """Return the denominator of each loss term of the global batch; the same on every rank.

    Each rank counts a whole small global batch, without communication. For a larger one, counts are summed over the
    world, to which one rank of each dp rank adds its own: dp's communicator still gathers the updated parameters.
    """
    layout, groups = built.layout, built.groups
    names = built.program.count_inputs
    shared = local or layout.num_microbatches * groups.mesh.dp > MAX_COUNTED
    if shared:
        microbatches = layout.microbatches(batch, names, groups.device, local=local)
    else:
        microbatches = layout.all_microbatches(batch, names, groups.device)

    def over_ranks(totals: Tensor) -> None:
        if shared and groups.over("dp") is not None:
            if any(groups.coordinate[axis] for axis in ("tp", "cp", "pp")):
                totals.zero_()
            dist.all_reduce(totals, group=groups.world)

    return built.program.totals(microbatches, over_ranks)


class Rounds:
    """The rounds of batches. Owns whether filler is known to add nothing to the loss."""

    def __init__(self, built: Built) -> None:
        self._built, self.layout, self.terms = built, built.layout, built.plan.to_run()[0].terms
        self._is_silent = False

    def of(self, batch: Batch, *, local: bool, scored: bool = False) -> list[Batch]:
        """Return the rounds of a batch; the batch itself if it has the planned size, is local, or is not valid.

        ``scored``: sequences are scored one by one, and no loss is summed. Raises PlanError for another size if the
        loss is not a sum over sequences.
        """
        size, number = self.layout.global_size, number_of(batch)
        if local or number in (0, size) or set(batch) != set(self.layout.inputs):
            return [batch]
        if not scored and not self.terms.adds_up:
            raise PlanError(
                f"the batch has {number} sequences, and the plan {size}: the loss of this model is no sum over "
                "sequences, which would add up for any number of them",
                where="batch",
                fix=f"give {size} sequences, or plan with another batch.global",
            )
        missing = -number % size
        if missing:
            filler = self.filler(batch, missing, scored=scored)
            batch = {name: torch.cat([x, filler[name]]) for name, x in batch.items()}
        return [{name: x[i : i + size] for name, x in batch.items()} for i in range(0, number + missing, size)]

    def totals(self, rounds: Sequence[Batch]) -> list[Tensor]:
        """Return the counts of all rounds together; the same on every rank."""
        counts = [denominators(self._built, each, local=False) for each in rounds]
        return [torch.stack(column).sum(0) for column in zip(*counts, strict=True)]

    def nothing(self, batch: Batch) -> list[Batch]:
        """Return a round of filler alone; none if ``batch`` needs no filler, or filler is known to add nothing."""
        if self._is_silent or not -number_of(batch) % self.layout.global_size:
            return []
        return [self.filler(batch, self.layout.global_size)]

    def require_silence(self, loss: float, batch: Batch) -> None:
        """Raise PlanError if ``loss``, that of ``nothing(batch)``, is not zero."""
        if loss:
            raise self._counted(batch)
        self._is_silent = self._is_silent or bool(-number_of(batch) % self.layout.global_size)

    def filler(self, batch: Batch, count: int, *, scored: bool = False) -> dict[str, Tensor]:
        """Return copies of the last sequence that the loss does not count. Raises PlanError if there are none."""
        rows = {name: x[-1:].expand(count, *x.shape[1:]) for name, x in batch.items()}
        if scored:
            return rows
        number = self._uncounted(batch)
        return {n: torch.full_like(x, number) if n in self.terms.count_inputs else x for n, x in rows.items()}

    def _uncounted(self, batch: Batch) -> int:
        """Return the value that hides a sequence from all counts. Raises PlanError if there is none."""
        program, names = self._built.program, self._built.program.count_inputs
        if program.count_module is None:
            raise self._counted(batch)
        for number in UNCOUNTED:
            shapes = [(self.layout.micro, *batch[name].shape[1:]) for name in names]
            device = self._built.groups.device
            filler = {n: batch[n].new_full(s, number).to(device) for n, s in zip(names, shapes, strict=True)}
            if not any(program.totals([filler])):
                return number
        raise self._counted(batch)

    def _counted(self, batch: Batch) -> PlanError:
        return PlanError(
            f"the batch has {number_of(batch)} sequences, and this loss counts every sequence: none can be added that "
            "does not count",
            where="batch",
            fix=f"give a multiple of {self.layout.global_size} sequences",
        )


def number_of(batch: Batch) -> int:
    """Return the number of sequences; 0 if the tensors differ in it."""
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim()] if isinstance(batch, Mapping) else []
    sizes = {len(x) for x in tensors}
    return sizes.pop() if len(sizes) == 1 else 0
