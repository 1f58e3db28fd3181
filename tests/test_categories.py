"""benchmarks/categories.py: an op's time goes to one category, by its name and by what it stands in."""

from __future__ import annotations

import pytest
import torch

from benchmarks import category_worker as worker
from benchmarks.category_worker import ATTENTION, EXCHANGE, OPTIMIZER, OTHER, PRODUCTS, PYTHON, STEP, UPDATE, WAIT

CASES = (
    ("aten::mm", [], PRODUCTS),
    ("aten::addmm_", [], PRODUCTS),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [], ATTENTION),
    ("aten::gelu", [], OTHER),
    ("aten::copy_", ["aten::to"], OTHER),
    ("c10d::allreduce_", ["_GBackward"], EXCHANGE),
    (WAIT, [], EXCHANGE),
    ("aten::mul_", [UPDATE], OPTIMIZER),
    ("aten::addcdiv_", ["Optimizer.step#AdamW.step"], OPTIMIZER),
    ("c10d::allreduce_", [UPDATE], EXCHANGE),
    (WAIT, [UPDATE], EXCHANGE),
    ("autograd::engine::evaluate_function: MmBackward0", [], PYTHON),
    (STEP, [], PYTHON),
)


@pytest.mark.parametrize(("name", "around", "expected"), CASES)
def test_an_op_is_of_one_category(name: str, around: list[str], expected: str):
    assert worker.category(name, [name, *around, STEP]) == expected


def test_a_step_has_time_in_what_it_does_and_none_in_what_it_does_not():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(i: int) -> None:
        torch.tanh(model(torch.ones(8, 64))).sum().backward()
        optimizer.step()

    found = worker.wall_by_category(step, 2)
    assert set(found) == set(worker.CATEGORIES)
    assert all(found[name] > 0 for name in (PRODUCTS, OTHER, OPTIMIZER, PYTHON))
    assert found[EXCHANGE] == found[ATTENTION] == 0
