"""Every exchange that lowering inserts is needed: without any single one, some gradient or the loss is wrong."""

from __future__ import annotations

import os

import pytest
import torch

from examples.gpt import GPT
from passes.errors import PlanError
from planner import plan
from runtime.audit.own_module import Tolerance
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.verify.comparison import compare_gradients, compare_value
from runtime.verify.mutants import num_collectives, without_collective
from runtime.verify.reference import OneProcess
from tests.tools.limits import HANG_SECONDS

SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 37}, "targets": {"like": "input_ids"}},
}


def build() -> GPT:
    torch.manual_seed(0)
    model = GPT(vocabulary=37, length=8, width=16, num_layers=2, num_heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases away from zero, so that each of them is seen
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(37, (4, 8), generator=generator) for name in ("input_ids", "targets")}


def run_each_mutant(mesh: dict) -> list[tuple[str, float, dict]]:
    """("whole" or the number taken out, loss, gradients), on rank 0 with tensors."""
    model = build()
    decided = plan(model, {**SPEC, "mesh": mesh})
    found = []
    for number in (None, *range(num_collectives(decided))):
        rank = int(os.environ["RANK"])
        program = None if number is None else without_collective(decided, rank, number)
        with Engine(decided, program=program, timeout_seconds=HANG_SECONDS) as engine:
            found.append((str(number), engine.forward_backward(batch()), engine.gather_gradients()))
    return found


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "at_least"), [({"tp": 2}, 10), ({"tp": 2, "pp": 2}, 10), ({"cp": 2}, 2), ({"cp": 2, "pp": 2}, 2)], ids=str
)
def test_without_any_single_exchange_the_result_is_wrong(mesh, at_least):
    found = launch(run_each_mutant, 2 * mesh.get("pp", 1), mesh, timeout_seconds=HANG_SECONDS)[0]
    assert len(found) > at_least
    one = OneProcess(build(), _spec())
    loss = one.forward_backward(batch())
    gradients = {name: p.grad for name, p in one.model.named_parameters(remove_duplicate=False)}
    allowed = Tolerance.of(torch.float64, lr=1e-3)
    verdicts = {}
    for number, mutant_loss, mutant_gradients in found:
        rows = [compare_value("loss", mutant_loss, loss, allowed.loss, 1)]
        rows += compare_gradients(mutant_gradients, gradients, allowed)
        verdicts[number] = all(row.passed for row in rows)
    assert verdicts.pop("None")
    assert [number for number, equal in verdicts.items() if equal] == []


@pytest.mark.thorough
def test_a_number_beyond_the_last_is_refused():
    decided = plan(build(), SPEC)
    last = num_collectives(decided)
    with pytest.raises(PlanError, match=f"there is no collective {last} to remove") as caught:
        without_collective(decided, 0, last)
    assert f"hold {last} of them, numbered from 0" in caught.value.fix


def _spec():
    from planner.spec.spec import Spec

    return Spec.load(SPEC)
