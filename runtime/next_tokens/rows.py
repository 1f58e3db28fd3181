"""The logits that predict the next token of each sequence, on the ranks that have them, and the token on all ranks.

The stages run as in an evaluation; that of the loss is lowered once more, and returns these rows beside the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes.add_next_rows import WANTED
from passes.errors import PlanError
from passes.ops.next_rows import Wanted
from passes.stage_module import RankProgram
from planner.exchanges.next_rows import FIGURES
from planner.frozen_plan import Plan
from planner.lower import lower_next_rows
from runtime.data.batches import BatchLayout
from runtime.distributed.groups import Groups
from runtime.next_tokens.choice import Choice
from runtime.pipeline.executor import Executor, Step
from runtime.weights.shards import share

NOT_A_NUMBER, NOT_CAUSAL, NOT_KEPT = 1, 2, 3
ALLOWED = 8  # times the precision of the weights: two runs of one sequence may differ by their rounding


class NotKept(PlanError):
    """Kept values of earlier positions give other logits than the whole forward."""


class NextRows:
    """Owns the stage of the loss in the form that returns rows of logits, if this rank runs it.

    Raises PlanError if the loss gives no label a probability.
    """

    def __init__(
        self, plan: Plan, program: RankProgram, layout: BatchLayout, executor: Executor, groups: Groups
    ) -> None:
        self.layout, self.groups, self._wanted = layout, groups, Wanted(program.random)
        last = lower_next_rows(plan, groups.rank, program, groups.device)
        stages = list(executor.stages)
        if last is not None:
            place = [stage.index for stage in stages].index(last.index)
            share(stages[place], last, groups.device)
            self._wanted = getattr(last.module, WANTED)
            stages[place] = last
        self._precision = max((torch.finfo(p.dtype).eps for s in stages for p in _floats(s.module)), default=0.0)
        self.executor = Executor(stages, executor.order, executor.transport, executor.random)

    def rows(self, step: Step, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [n, v], counts [n]) of this dp rank's n sequences: zero counts for those of other ranks.

        ``wanted`` [microbatches of the global batch, micro]: places of labels.
        """
        self._wanted.places = wanted.to(self.groups.device)
        self.executor.evaluate(step)
        if not self.executor.scores:
            return torch.zeros(0, 1), torch.zeros(0)
        found = torch.cat(self.executor.scores)
        return found[:, :-1], found[:, -1]

    def faults(self, rows: Tensor, counts: Tensor, others: Tensor | None = None) -> Tensor:
        """[n]: what is wrong with each row; ``others``: the rows of the same sequences with other tokens behind."""
        found = torch.where(rows.isfinite().any(1) & ~rows.isnan().any(1), 0, NOT_A_NUMBER)
        if others is not None:
            size = rows.abs().nan_to_num(posinf=0.0).amax(1)
            apart = (rows - others).abs().nan_to_num(nan=0.0).amax(1)
            found = torch.where(apart > ALLOWED * self._precision * size, NOT_CAUSAL, found)
        return torch.where(counts > 0, found, 0)

    def tokens(
        self,
        rows: Tensor,
        counts: Tensor,
        faults: Tensor,
        choice: Choice,
        samples: Sequence[int],
        positions: Sequence[int],
    ) -> list[int]:
        """The next token of each sequence of the global batch, the same on every rank: one sum joins them.

        ``samples``, ``positions``: of each sequence of the global batch. Raises PlanError on every rank if there is
        none.
        """
        total = torch.zeros((FIGURES, self.layout.global_size), dtype=torch.int64, device=self.groups.device)
        if len(rows):
            first = self.layout.first_microbatch * self.layout.micro
            own = slice(first, first + len(rows))
            found = counts > 0
            chosen = choice.tokens(rows.nan_to_num(nan=0.0), samples[own], positions[own])
            total[:, own] = torch.stack([torch.where(found, chosen, 0), counts.to(torch.int64), faults.to(torch.int64)])
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        chosen, times, wrong = total.cpu()
        _check(times, wrong, positions)
        return chosen.tolist()


def _floats(module: torch.nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.is_floating_point()]


def _check(times: Tensor, faults: Tensor, positions: Sequence[int]) -> None:
    if (times != 1).any():
        at = int((times != 1).nonzero()[0])
        what = f"the loss predicts the token at position {positions[at]} {int(times[at])} times"
        raise PlanError(what, where="loss", fix="generate with a model that predicts each token once")
    if (faults == NOT_CAUSAL).any():
        raise PlanError(
            "the prediction changes with the tokens behind it: the model is not causal, or its labels are the next "
            "tokens already",
            where="generate",
            fix="generate with a causal model; if it does not shift its labels, set data: {inputs: {LABELS: "
            "next_tokens}}",
        )
    if (faults == NOT_KEPT).any():
        raise NotKept(
            "the logits of one position, with the kept values of those before it, are not those of the whole forward",
            where="cache",
            fix="leave cache out: each token then runs the whole forward",
        )
    if (faults == NOT_A_NUMBER).any():
        at = int((faults == NOT_A_NUMBER).nonzero()[0])
        what = f"the logits of the token at position {positions[at]} hold a NaN, or nothing finite"
        raise PlanError(what, where="generate", fix="load other weights, or compute in a higher precision")
