"""Whole tensors come to rank 0 through host memory, when it asks for them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from passes.errors import PlanError
from runtime.distributed.agreement import agree, broadcast_json
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from tests.tools.handmade_stages import build_batch, build_model, build_plan, lower
from tests.tools.limits import HANG_SECONDS

SIZE = 8


def gather_without_the_device_group() -> dict[str, torch.Tensor]:
    """The group for the device carries nothing from host memory: it is not there."""
    rank = int(os.environ["RANK"])
    plan = build_plan(build_model(), size=SIZE, pp=2)
    with Engine(plan, program=lower(plan, rank), timeout_seconds=HANG_SECONDS) as engine:
        engine.forward_backward(build_batch(SIZE, 0))
        no_group: Any = "no group"
        engine.groups.world = engine.groups.by_name["pp"] = no_group
        assert broadcast_json(engine.groups, f"said by {rank}") == "said by 0"
        with pytest.raises(PlanError, match="rank 1 will not"):
            agree(engine.groups, PlanError("rank 1 will not", fix="wait") if rank else None)
        engine.gather_gradients()
        return engine.gather_parameters()


@pytest.mark.slow
def test_weights_and_objects_go_over_the_host_group_alone():
    found, nothing = launch(gather_without_the_device_group, 2, timeout_seconds=HANG_SECONDS)
    expected = dict(build_model().named_parameters())
    assert nothing == {}
    assert set(found) == set(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name])
