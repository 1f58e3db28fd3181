"""Models of images and text with the batch of their processor: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.forms import given_by
from planner.spec.spec import Spec
from tests.models.processed import EQUAL, FAMILIES
from tests.tools.simulated_mesh import equals_one_process

CLOSE = 1e-6  # its logits are cast to float32
LAYOUTS = [
    pytest.param({"cp": 2, "tp": 2}, {}, id="cp2·tp2"),
    pytest.param({"tp": 2}, {"tensor_parallel": {"sequence_parallel": True}}, id="sequence parallel"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "more"), LAYOUTS)
@pytest.mark.parametrize("name", EQUAL)
def test_patches_of_all_images_and_tokens_at_other_places_in_each_sequence(
    name: str, mesh: dict[str, int], more: Any
) -> None:
    torch.manual_seed(1)
    family = FAMILIES[name]
    rows = family.batch()
    forms = Spec.load({"mesh": mesh, "batch": {"global": 2, "micro": 2}, "inputs": family.inputs}).forms
    alone = lambda model: model(**given_by(forms, rows)).loss  # noqa: E731
    how = {"alone": alone, "inputs": family.inputs, **more}
    equals_one_process(family.model, rows, mesh, loss=CLOSE, gradient=CLOSE, **how)
