"""Generation with kept rows: the forward of a prompt keeps the keys and values of its positions, and each further token
is the forward of one position.

    prefill   the stages at the planned length, as for a token without kept rows; buffers are filled
    at t      the stages at position t alone: they write row t of the buffers, and read all rows

A round's sequences move together. A position that a longer prompt has already is computed for it again, to the same
values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from passes.add_next_rows import WANTED
from passes.errors import PlanError
from passes.keep_rows import KEPT
from passes.ops.kept_rows import KeptRows
from passes.ops.next_rows import Wanted
from passes.stage_module import RankProgram, StageModule
from planner.frozen_plan import Plan
from planner.lower import lower_kept_rows
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.next_tokens.rows import NOT_KEPT
from runtime.pipeline.executor import Executor, Step
from runtime.weights.shards import share


class KeptPositions:
    """Owns the buffers of this rank, and its stages that fill and read them.

    Raises PlanError, on the ranks that find it, if one position needs more than kept rows.
    """

    def __init__(self, plan: Plan, program: RankProgram, executor: Executor, groups: Groups) -> None:
        self.groups = groups
        keeping, alone, self._precision = lower_kept_rows(plan, groups.rank, program, groups.device)
        self.kept, self._wanted = KeptRows(program.random), Wanted(program.random)
        for trained, *stages in zip(executor.stages, keeping, alone, strict=True):
            for stage in stages:
                share(trained, stage, groups.device)
                setattr(stage.module, KEPT, self.kept)
        for stage in keeping:
            if stage.has_scores:
                self._wanted = getattr(stage.module, WANTED)
        self._all, self._one = self._executor(executor, keeping), self._executor(executor, alone)

    def prefill(self, step: Step, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """As ``NextRows.rows``; the buffers are filled."""
        self._wanted.places = wanted.to(self.groups.device)
        return self._rows(self._all, step)

    def at(self, position: int, step: Step) -> tuple[Tensor, Tensor]:
        """(logits [n, v], counts [n]) of the token behind ``position``, of this dp rank's n sequences."""
        self.kept.at = position
        return self._rows(self._one, step)

    def apart(self, rows: Tensor, whole: Tensor, counts: Tensor) -> Tensor:
        """[n]: whether a row that counts is not that of the ``whole`` forward. Products of one row and of many sum in
        other orders, layer by layer; their rounding together is less than the root of the precision."""
        size = whole.abs().nan_to_num(posinf=0.0).amax(1)
        differ = (rows - whole).abs().nan_to_num(nan=0.0).amax(1) > self._precision**0.5 * size
        return torch.where(differ & (counts > 0), NOT_KEPT, 0)

    @property
    def num_bytes(self) -> int:
        """Of the buffers of this rank."""
        return self.kept.num_bytes

    def free(self) -> None:
        """Drop the buffers."""
        self.kept.buffers.clear()

    def _rows(self, executor: Executor, step: Step) -> tuple[Tensor, Tensor]:
        executor.evaluate(step)
        if not executor.scores:
            return torch.zeros(0, 1), torch.zeros(0)
        found = torch.cat(executor.scores)
        return found[:, :-1], found[:, -1]

    def _executor(self, executor: Executor, stages: Sequence[StageModule]) -> Executor:
        return Executor(stages, executor.order, executor.transport, executor.random)


def kept_positions(plan: Plan, program: RankProgram, executor: Executor, groups: Groups) -> KeptPositions | PlanError:
    """The same kind on every rank: the first refusal of any of them, if there is one."""
    found: KeptPositions | PlanError
    try:
        found = KeptPositions(plan, program, executor, groups)
    except PlanError as error:
        found = error
    own = [found.what, str(found.where or "")] if isinstance(found, PlanError) else []
    told = [own] if groups.world is None else all_gather_json(groups, own)
    what, where = next((each for each in told if each), ("", ""))
    return (
        PlanError(what, where=where, fix="leave cache out: each token then runs the whole forward") if what else found
    )
