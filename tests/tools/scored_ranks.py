"""Scores of labels by every rank of a mesh, as threads: each runs the stages of its pipeline one after the other.

What a stage sends its successor gets as it is, as chunks of one rank hand it over; so a mesh of pp stages needs no more
threads than one of pp 1. The sum over all ranks, which the runtime takes, is taken here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.base import RankProgram, StageModule
from passes.ops.loss_head import SCORES
from planner import Plan
from planner.lower import lower, lower_with_head
from runtime.weights.shards import fill, share
from runtime.weights.sources import ModelWeights
from tests.tools.captures import plan_again
from tests.tools.ranks import Ranks
from tests.tools.simulated_mesh import Batch, bind, given_to, shares_of, spec_of

CPU = torch.device("cpu")


def scores_on(
    make: Callable[[], nn.Module],
    batch: Batch,
    mesh: Mapping[str, int],
    *,
    change: Callable[[StageModule], None] = lambda _: None,
    **more: Any,
) -> tuple[Plan, Tensor, list[RankProgram]]:
    """The plan, [3, *labels] of the global batch, and what each rank ran. ``change``: of each scoring stage."""
    model = make()
    made = plan_again(model, spec_of(batch, mesh, **more))
    programs = [lower(made, rank) for rank in range(made.mesh.world_size)]
    scoring: dict[int, StageModule] = {}
    for rank, program in enumerate(programs):
        fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(rank), CPU)
        program.random.training = False
        last = lower_with_head(made, rank, program, want=SCORES)
        if last is not None:
            share(next(stage for stage in program.stages if stage.has_loss), last, CPU)
            change(last)
            scoring[rank] = last
    shares = shares_of(batch, made.mesh.dp)
    totals = programs[0].totals(shares)
    fronts = [rank for rank in range(made.mesh.world_size) if not made.mesh.place(rank)["pp"]]

    @torch.no_grad()
    def run(number: int) -> Tensor:
        here = {**made.mesh.place(fronts[number]), "pp": 0}
        ranks = [rank for rank in range(len(programs)) if {**made.mesh.place(rank), "pp": 0} == here]
        bind([programs[rank] for rank in ranks], made.mesh, fronts[number], fronts)
        stages = {stage.index: stage for rank in ranks for stage in programs[rank].stages}
        stages |= {scoring[rank].index: scoring[rank] for rank in ranks if rank in scoring}
        return _run([stages[index] for index in sorted(stages)], shares[here["dp"]], totals)

    parts = Ranks(len(fronts)).run(run)
    rows = [
        torch.stack([part for part, rank in zip(parts, fronts, strict=True) if made.mesh.place(rank)["dp"] == d]).sum(0)
        for d in range(made.mesh.dp)
    ]
    return made, torch.cat(rows, 1), programs


def _run(stages: list[StageModule], batch: Batch, totals: list[Tensor]) -> Tensor:
    """What the last of the stages returns before its loss."""
    passed: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    for stage in stages:
        received = [passed[boundary.name] for boundary in stage.receives]
        outputs = list(stage.module(*received, *given_to(stage, batch, totals)))
        passed |= {boundary.name: value for boundary, value in zip(stage.sends, outputs, strict=False)}
    return outputs[-2]
