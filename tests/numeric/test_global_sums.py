"""Losses that are no sums over tokens, over several microbatches a rank: as one process on the global batch."""

import math
from typing import Any

import pytest
import torch

from planner import Plan
from runtime.engine.engine import Engine
from tests.models import families
from tests.tools.laboratory import Case, Lab, name_of
from tests.tools.limits import HANG_SECONDS

Batch = dict[str, torch.Tensor]

LOSSES = ("balanced-loss", "spread-loss")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "dp2": ({"dp": 2}, {}),
    "tp2 pp2": ({"tp": 2, "pp": 2}, {}),
    "cp2 dp2": ({"cp": 2, "dp": 2}, {}),
    "pp2 vpp2, recompute": (
        {"pp": 2, "vpp": 2},
        {"pipeline": {"schedule": "interleaved_1f1b"}, "recompute": "full"},
    ),
    "pp2, zero bubble": ({"pp": 2}, {"pipeline": {"schedule": "zero_bubble"}}),
    "dp2, blocks in graphs": ({"dp": 2}, {"cuda_graphs": {"impl": "emulate", "warmup_steps": 1}}),
    "one graph": ({}, {"cuda_graphs": {"impl": "emulate", "scope": ["full_iteration"], "warmup_steps": 1}}),
}


def evaluated(made: Plan, batches: list[Batch]) -> float:
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        return engine.evaluate(batches[0])


def of_own_rows(made: Plan, batches: list[Batch]) -> float:
    """The loss of the global batch, of which each dp rank is given its rows."""
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        own = {name: rows.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for name, rows in batches[0].items()}
        return engine.forward_backward(own, local=True)


def with_no_label(decided: Plan, batches: list[Batch], kept: int) -> tuple[float, Batch]:
    """Loss and gradients where all sequences but the first ``kept`` have every label ignored."""
    batch = {k: v.clone() for k, v in batches[0].items()}
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][kept:] = families.IGNORED
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        loss = engine.forward_backward(batch)
        return loss, dict(engine.gather_gradients())


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", LOSSES)
def test_a_loss_of_means_is_that_of_the_global_batch(lab: Lab, model: str, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    assert lab.check(Case(model, mesh, rest, num_sequences=8, micro=1)).wrong == []


def test_an_evaluation_takes_its_means_over_the_global_batch(lab: Lab) -> None:
    case = Case("spread-loss", {"dp": 2}, num_sequences=8, micro=1, job=evaluated)
    entry = families.build("spread-loss")
    expected = entry.loss(entry.model.eval()(**entry.batch(8, 0)))
    assert lab.run(case) == [pytest.approx(expected.item(), rel=1e-12)] * 2


def test_counts_that_read_counts_are_summed_over_the_ranks_level_by_level(lab: Lab) -> None:
    case = Case("whitened-loss", {"dp": 2, "tp": 2}, num_sequences=8, micro=2, job=of_own_rows)
    entry = families.build("whitened-loss")
    expected = entry.loss(entry.model.eval()(**entry.batch(8, 0)))
    assert lab.run(case) == [pytest.approx(expected.item(), rel=1e-12)] * 4


@pytest.mark.thorough
def test_experts_of_a_family_with_their_loss(lab: Lab) -> None:
    case = Case("mixtral-balanced", {"dp": 2, "ep": 2}, {"precision": {"parameters": "float32"}}, 8, 2)
    assert lab.check(case).wrong == []


@pytest.mark.thorough
def test_means_of_each_microbatch_are_another_training(lab: Lab) -> None:
    rest = {"batch": {"global": 8, "micro": 1, "statistics": "microbatch"}}
    assert lab.check(Case("spread-loss", {}, rest, num_sequences=8, micro=1)).wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"dp": 1}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=name_of)
@pytest.mark.parametrize("kept", [0, 2])
def test_microbatches_without_a_label_give_what_one_process_gives(lab: Lab, kept: int, layout: dict[str, int]) -> None:
    case = Case("matmul", layout, job=with_no_label, job_arguments=(kept,))
    loss, gradients = lab.run(case)[0]
    entry = families.build("matmul")
    batch = entry.batch(case.num_sequences, 0)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][kept:] = families.IGNORED
    expected = entry.loss(entry.model(**batch))
    expected.backward()
    assert math.isnan(loss) if kept == 0 else math.isclose(loss, expected.item(), rel_tol=1e-10)
    for name, parameter in entry.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12)
