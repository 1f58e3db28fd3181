"""float16 with a dynamic loss scale: an overflow on one rank skips the step on all, and training goes on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime import Engine
from tests.tools.jobs import own_parameters
from tests.tools.laboratory import ADAMW, Case, Lab
from tests.tools.limits import HANG_SECONDS

FLOAT16 = {"precision": {"parameters": "float16", "loss_scale": "dynamic"}, "optimizer": ADAMW}
NUM_STEPS, BAD = 5, 2


def with_an_overflow(
    decided: Any, batches: list[dict[str, Tensor]], bad_rank: int, part: str = ""
) -> list[tuple[Any, ...]]:
    """Of each step: skipped, the scale after it, whether the weights are the old ones, the loss; at BAD the largest
    weight of one rank alone is too large for float16's products. ``part``: of the name of that weight."""
    rows = []
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        for step in range(NUM_STEPS):
            engine.weights.ready()
            before = {name: value.clone() for name, value in own_parameters(engine).items()}
            is_bad = step == BAD and dist.get_rank() == bad_rank
            largest = max((name for name in before if part in name), key=lambda name: before[name].numel())
            if is_bad:
                own_parameters(engine)[largest].fill_(6e4)
            report = engine.train_step(batches[step % len(batches)])
            engine.weights.ready()
            if is_bad:
                own_parameters(engine)[largest].copy_(before[largest])
            is_same = all(torch.equal(before[name], value) for name, value in own_parameters(engine).items())
            rows.append((report.skipped, engine.loss_scale.value, is_same, repr(report.loss)))
    return rows


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("bad_rank", [0, 3], ids=["first stage", "last stage"])
def test_one_ranks_overflow_skips_the_step_on_every_rank_and_halves_the_scale(lab: Lab, bad_rank: int) -> None:
    check(lab.run(Case("gpt2", {"tp": 2, "pp": 2}, FLOAT16, job=with_an_overflow, job_arguments=(bad_rank,))))


@pytest.mark.thorough
@pytest.mark.slow
def test_an_overflow_in_one_ranks_experts_skips_the_step_on_every_rank(lab: Lab) -> None:
    case = Case("experts", {"dp": 2, "ep": 2}, FLOAT16, job=with_an_overflow, job_arguments=(1, "experts"))
    check(lab.run(case))


def check(ranks: list[Any]) -> None:
    assert all(rows == ranks[0] for rows in ranks)
    assert [row[0] for row in ranks[0]] == [step == BAD for step in range(NUM_STEPS)]
    assert [row[1] for row in ranks[0]] == [2.0**15, 2.0**15, 2.0**14, 2.0**14, 2.0**14]
    assert [row[2] for row in ranks[0]] == [step == BAD for step in range(NUM_STEPS)]
