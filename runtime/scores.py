"""Scores of labels: how probable each of them is to the model, and whether it is the most probable class.

The stages run as in an evaluation; that of the loss is lowered once more, and returns scores beside the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError
from passes.ops.scores import COUNT, IS_TOP, LOG_PROBABILITY
from passes.stage_module import RankProgram
from planner.frozen_plan import Plan
from planner.lower import lower_scoring
from runtime.data.batches import BatchLayout
from runtime.distributed.groups import Groups
from runtime.pipeline.executor import Executor, Step
from runtime.weights.shards import share

FIGURES = 3


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every element of ``batch[key]``, the labels of the global batch; tensors are [global, ..] as it, on the CPU.

    ``log_probabilities`` (float64): natural logarithm of the probability that the model gives the label at its place; 0
    if it is not scored. ``is_top``: whether no class is more probable, nor as probable with a lower id.
    ``is_scored``: whether the loss takes the element as a target; it does not for an ignored label, nor, in models that
    shift labels inside, at the first token of a sequence.
    """

    key: str
    log_probabilities: Tensor
    is_top: Tensor
    is_scored: Tensor

    @staticmethod
    def joined(rounds: Sequence[Scores], number: int) -> Scores:
        """The first ``number`` sequences of several batches."""
        tensors = ("log_probabilities", "is_top", "is_scored")
        return Scores(rounds[0].key, *(torch.cat([getattr(r, name) for r in rounds])[:number] for name in tensors))


class Scoring:
    """Owns the stage of the loss in the form that scores, if this rank runs it, with the weights of training.

    Raises PlanError if the loss gives no label a probability.
    """

    def __init__(
        self, plan: Plan, program: RankProgram, layout: BatchLayout, executor: Executor, groups: Groups
    ) -> None:
        decisions, _ = plan.to_run()
        self.key, self.layout, self.groups = decisions.scored.key, layout, groups
        scoring = lower_scoring(plan, groups.rank, program, groups.device)
        stages = list(executor.stages)
        if scoring is not None:
            place = [stage.index for stage in stages].index(scoring.index)
            share(stages[place], scoring, groups.device)
            stages[place] = scoring
        self.executor = Executor(stages, executor.order, executor.transport, executor.random)

    def score(self, step: Step, *, local: bool = False) -> Scores:
        """Scores of the batch of ``step``, the same on every rank: each has those of its own tokens, and one sum joins
        them. ``local``: those of this dp rank's rows alone are returned."""
        self.executor.evaluate(step)
        shape, _ = self.layout.inputs[self.key]
        total = torch.zeros((FIGURES, self.layout.global_size, *shape), dtype=torch.float64, device=self.groups.device)
        if self.executor.scores:
            first = self.layout.first_microbatch * self.layout.micro
            found = torch.cat(self.executor.scores, 1)
            total[:, first : first + found.shape[1]] = found
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        size = self.layout.global_size // self.layout.dp
        rows = slice(self.layout.dp_rank * size, (self.layout.dp_rank + 1) * size) if local else slice(None)
        return self._checked(total.cpu()[:, rows])

    def _checked(self, total: Tensor) -> Scores:
        times = total[COUNT]
        if (times > 1).any():
            raise PlanError(
                f"the loss scores a label of batch[{self.key!r}] {int(times.max())} times, which is ambiguous",
                where="batch",
                fix="score a model that predicts each label once",
            )
        return Scores(self.key, total[LOG_PROBABILITY], total[IS_TOP] > 0, times > 0)
