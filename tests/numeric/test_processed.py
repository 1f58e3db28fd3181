"""Models of images and text with the batch of their processor: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.forms import given_by
from planner.spec.spec import Spec
from tests.models.processed import EQUAL, FAMILIES
from tests.tools.simulated_mesh import run_mesh

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
    rows, model = family.batch(), family.model()
    ran = run_mesh(family.model, rows, mesh, inputs=family.inputs, **more)
    forms = Spec.load({"mesh": mesh, "batch": {"global": 2, "micro": 2}, "inputs": family.inputs}).forms
    loss = model(**given_by(forms, rows)).loss
    loss.backward()
    torch.testing.assert_close(ran.loss.double(), loss.double().detach(), rtol=CLOSE, atol=CLOSE)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, truth in gradients.items():
        wrong = (ran.gradients.get(name, torch.zeros_like(truth)) - truth).norm() / norm
        assert wrong <= CLOSE, f"{name}: {wrong:.1e} of the gradients' norm"
