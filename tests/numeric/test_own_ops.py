"""A model of custom ops, with rules of their own or by trial, trains over tp and pp as in one process, and its ops are
sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from passes.rules.own import OWN
from planner import plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.verify.reference import OneProcess
from tests.tools.laboratory import Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.own_ops import LENGTH, VOCABULARY, build, spec_of

NUM_STEPS = 3


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (4, LENGTH)
    return [
        {n: torch.randint(VOCABULARY, shape, generator=generator) for n in ("ids", "labels")} for _ in range(NUM_STEPS)
    ]


def trained(decided: Any) -> tuple[list[float], dict[str, Tensor]]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.train_step(batch).loss for batch in batches()], engine.gather_parameters()


def on(host: Any, mesh: dict[str, int], has_rules: bool) -> tuple[list[str], tuple[list[float], dict[str, Tensor]]]:
    if not has_rules:
        OWN.clear()  # of this process, a fork for this call
    decided = plan(build(), spec_of(**mesh))
    sharded = sorted(row.name for row in decided.parameters if "V" in str(row.placement))
    ranks = mesh.get("tp", 1) * mesh.get("pp", 1)
    return sharded, host.run_ranks(ranks, trained, decided)[0]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("has_rules", [True, False], ids=["rules", "by trial"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_own_ops_are_sharded_and_equal_one_process(lab: Lab, mesh: dict[str, int], has_rules: bool) -> None:
    sharded, (losses, found) = lab.call(on, mesh, has_rules)
    assert {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias", "decay", "down")} <= set(sharded)
    alone = OneProcess(build(), Spec.load(spec_of()))
    assert losses == pytest.approx([alone.train_step(batch) for batch in batches()], rel=1e-12)
    for name, value in alone.model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-9)
