"""The stages of a rank for one length and number of sequences; all variants share weights and optimizer.

The variant of the longest length is made at the start, each other at its first batch: its stages are lowered then, over
the tensors of the first. A number of sequences that was not planned runs the planned stages in its own schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from passes.base import RankProgram
from passes.errors import PlanError
from planner.lower import lower_again
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import build_schedule
from planner.pipeline.simulate import planned as planned_schedule
from runtime.compiled.functions import CompiledPieces
from runtime.cuda_graphs.graphs import Graphs
from runtime.data.batches import BatchChecks, BatchLayout
from runtime.engine.batch_prep import Intake, Rounds, number_of
from runtime.engine.build import Built, batch_layout, contributions_of, executor_of, graphs_of
from runtime.engine.log_probs import Scoring, build_outside
from runtime.engine.next_tokens import KeptPositions, NextRows, NotKept, kept_positions
from runtime.pipeline.executor import Executor, Step
from runtime.weights.shards import share


@dataclass
class Variant:
    """A variant. ``contributions``: id of a parameter → number of its gradients in a backward. ``outside``: the variant
    with a loss outside the model.
    """

    built: Built
    executor: Executor
    graphs: Graphs | None
    intake: Intake
    rounds: Rounds
    contributions: dict[int, int]
    outside: Variant | None = None

    @property
    def program(self) -> RankProgram:
        return self.built.program

    @property
    def layout(self) -> BatchLayout:
        return self.built.layout

    def count_sums(self, step: Step, *, training: bool) -> None:
        """Run the forwards of a step for the sums over the global batch that its loss reads, if it reads any."""
        if self.program.sums is not None:
            self.program.sums.begin()
            self.executor.evaluate(step, training=training)
            self.program.sums.end()

    @cached_property
    def scoring(self) -> Scoring:
        """The stage of the loss, lowered on first use. Raises PlanError if the loss gives no label a probability."""
        return Scoring(self.built, self.executor)

    @cached_property
    def next_rows(self) -> NextRows:
        """The stage of the loss, lowered on first use. Raises PlanError if the loss gives no label a probability."""
        return NextRows(self.built, self.executor)

    @cached_property
    def _kept(self) -> KeptPositions | NotKept:
        return kept_positions(self.built, self.executor)

    def kept(self) -> KeptPositions:
        """Return the stages with kept rows, lowered on first use on all ranks. Raises NotKept, the same on every rank,
        if one position of a sequence needs more than kept rows of earlier ones.
        """
        if isinstance(self._kept, NotKept):
            raise self._kept
        return self._kept


class Variants:
    """The variants by length and number of sequences. ``layouts``: the planned ones, by ascending length."""

    def __init__(self, built: Built, before_backward: Callable[[bool], None]) -> None:
        self._groups, self._before_backward, self._checks = built.groups, before_backward, BatchChecks(built.groups)
        self._plans, self._compares = built.plan.of_all_lengths, bool(built.plan.lengths)
        self.layouts = [batch_layout(each, self._groups) for each in self._plans]
        self.longest = self._made(built, None)
        self._made_at = {(len(self._plans) - 1, self.longest.layout.global_size): self.longest}

    def of(self, batch: Mapping[str, Tensor], *, local: bool, any_number: bool = False) -> Variant:
        """Return the variant for a batch, the same on all ranks. ``any_number``: its sequences run in rounds.

        Raises PlanError on every rank if their batches differ in length or number, and for a number that cannot run.
        """
        place = self.place_of(batch)
        planned = self.layouts[place].global_size
        number = planned if any_number else self._number(batch, planned, local=local)
        self._require_agreed(place, number)
        if (place, planned) not in self._made_at:
            self._made_at[place, planned] = self._lowered(place)
        if (place, number) not in self._made_at:
            self._made_at[place, number] = self._resized(self._made_at[place, planned], number)
        return self._made_at[place, number]

    def outside(self, variant: Variant) -> Variant:
        """Return the variant with a loss outside the model, lowered on first use. Raises PlanError if the model's own
        loss gives no label a probability, and for a plan with CUDA graphs.
        """
        if variant.outside is None:
            if variant.graphs is not None:
                fix = "set cuda_graphs: {impl: none}"
                raise PlanError("CUDA graphs hold the model's own loss, not a function", where="cuda_graphs", fix=fix)
            built, executor = build_outside(variant.built, variant.executor, self._before_backward)
            _watch(executor, variant.executor)
            changes = {"built": built, "executor": executor, "contributions": contributions_of(built.program)}
            variant.outside = replace(variant, **changes)
        return variant.outside

    def place_of(self, batch: Mapping[str, Tensor]) -> int:
        """Return the index in ``plan.lengths``; the last for a batch with none of them, which its check reports."""
        last = len(self.layouts) - 1
        if not last or not isinstance(batch, Mapping):
            return last
        shapes = {name: tuple(x.shape[1:]) for name, x in batch.items() if isinstance(x, Tensor)}
        planned = [{name: shape for name, (shape, _) in layout.inputs.items()} for layout in self.layouts]
        return planned.index(shapes) if shapes in planned else last

    # ---- which of them

    def _number(self, batch: Mapping[str, Tensor], planned: int, *, local: bool) -> int:
        """Return the number of sequences in the global batch; the planned one if another cannot run.

        A rank with another number by mistake would keep the others waiting: only ranks that compare their batches in
        each step take any number.
        """
        number = number_of(batch) * (self._groups.mesh.dp if local else 1)
        step = self.longest.layout.micro * self._groups.mesh.dp
        is_agreed = self._compares or self._groups.host is None
        return number if number and not number % step and is_agreed and self._takes_any else planned

    @property
    def _takes_any(self) -> bool:
        """Whether another number of sequences can run: losses add up, and no CUDA graph holds the planned number."""
        terms = self._plans[-1].to_run()[0].terms
        by_kind = self._plans[-1].schedule.kind in KINDS  # a user's schedule is for one number
        return terms is not None and terms.adds_up and self.longest.graphs is None and by_kind

    def _require_agreed(self, place: int, number: int) -> None:
        if self._groups.host is None or not self._compares:
            return
        own = [place, -place, number, -number]
        least = torch.tensor(own)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._groups.host)
        if least.tolist() != own:
            what = "the batches of this step have other lengths, or other numbers of sequences, on other ranks"
            raise PlanError(what, where="batch", fix="give every rank a batch of the same shape")

    # ---- made when they are first needed

    def _lowered(self, place: int) -> Variant:
        """Return the variant of another length, over the tensors of the first."""
        plan, first, groups = self._plans[place], self.longest, self._groups
        program = lower_again(plan, groups.rank, first.program, first.built.plan, groups.device)
        for trained, other in zip(first.program.stages, program.stages, strict=True):
            share(trained, other, groups.device)
        if program.count_module is not None:
            program.count_module.to(groups.device)
        compiled = None if first.built.compiled is None else CompiledPieces.of(plan, program)
        built = replace(first.built, plan=plan, program=program, layout=self.layouts[place], compiled=compiled)
        return self._made(built, first.executor)

    def _resized(self, planned: Variant, number: int) -> Variant:
        """Return the planned stages in a schedule of the microbatches of ``number`` sequences."""
        plan, layout, mesh = planned.built.plan, planned.layout, planned.built.plan.mesh
        group = plan.spec["pipeline"]["group_size"]
        times = number // (layout.micro * mesh.dp)
        schedule = planned_schedule(build_schedule(plan.schedule.kind, mesh.pp, times, mesh.vpp, group))
        resized = replace(plan, schedule=schedule)
        built = replace(planned.built, plan=resized, layout=replace(layout, global_size=number))
        return self._made(built, planned.executor)

    def _made(self, built: Built, first: Executor | None) -> Variant:
        graphs = graphs_of(built)
        if graphs is not None:
            self._groups.before_end.append(graphs.release)
        executor = executor_of(Executor, built, self._before_backward, graphs)
        if first is not None:
            _watch(executor, first)
        intake, contributions = Intake(built, self._checks), contributions_of(built.program)
        return Variant(built, executor, graphs, intake, Rounds(built), contributions)


def _watch(executor: Executor, first: Executor) -> None:
    """Let observers of the first executor see the steps of another."""
    executor.transport.waits = first.transport.waits
    executor.around = lambda action, step: first.around(action, step)
