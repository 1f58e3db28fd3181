"""Divisors made of shapes, loops over the batch, and labels that are all ignored: as in one process."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models import families
from tests.models.counted import MODELS, with_no_label
from tests.tools.laboratory import Case, Lab

LAYOUTS = [{"dp": 1}, {"tp": 2, "pp": 2}]


def name_of(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_a_divisor_made_of_shapes_counts_the_global_batch(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []


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
