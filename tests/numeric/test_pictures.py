"""Families of transformers with patches or frames, cut over cp: equal to one process."""

from __future__ import annotations

import pytest
import torch

from tests.models.pictures import PICTURES, made
from tests.tools.simulated_mesh import run_mesh

CLOSE = {"llava": 1e-6}  # its logits are cast to float32


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=["cp2", "cp2·tp2"])
@pytest.mark.parametrize("name", PICTURES)
def test_equal_to_one_process(name: str, mesh: dict[str, int]) -> None:
    model, batch = made(name)
    ran = run_mesh(lambda: made(name)[0], batch, mesh)
    loss, most = model(**batch).loss, CLOSE.get(name, 1e-10)
    loss.backward()
    torch.testing.assert_close(ran.loss.double(), loss.double().detach(), rtol=most, atol=most)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for parameter, truth in gradients.items():
        wrong = (ran.gradients.get(parameter, torch.zeros_like(truth)) - truth).norm() / norm
        assert wrong <= most, f"{parameter}: {wrong:.1e} of the gradients' norm"
