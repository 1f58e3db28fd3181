"""A model of custom ops, with rules of their own or by trial, trains over tp and pp as in one process, and its ops are
sharded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from passes.rules.own import OWN
from planner import plan
from tests.tools.laboratory import Lab
from tests.tools.own_ops import LENGTH, VOCABULARY, build, spec_of
from tests.tools.training import Trained, trained_by_spec, trained_on

NUM_STEPS = 3


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (4, LENGTH)
    return [
        {n: torch.randint(VOCABULARY, shape, generator=generator) for n in ("ids", "labels")} for _ in range(NUM_STEPS)
    ]


def on(host: Any, mesh: dict[str, int], has_rules: bool) -> tuple[list[str], Trained]:
    if not has_rules:
        OWN.clear()  # of this process, a fork for this call
    decided = plan(build(), spec_of(**mesh))
    sharded = sorted(row.name for row in decided.parameters if "V" in str(row.placement))
    return sharded, trained_on(host, decided, batches())


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("has_rules", [True, False], ids=["rules", "by trial"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_own_ops_are_sharded_and_equal_one_process(lab: Lab, mesh: dict[str, int], has_rules: bool) -> None:
    sharded, found = lab.call(on, mesh, has_rules)
    assert {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias", "decay", "down")} <= set(sharded)
    truth = trained_by_spec(build(), spec_of(), batches())
    assert found.losses == pytest.approx(truth.losses, rel=1e-12)
    assert found.furthest(truth.parameters) <= 1e-9
