"""precision.gather: each step computes with weights that are rounded to it, and updates the exact ones."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import families
from tests.tools.laboratory import Case, Lab, name_of
from tests.tools.training import train

LR, STEPS = 1e-3, 3


def one_process(model: nn.Module, batches: list[dict[str, torch.Tensor]], loss_of: Any, dtype: torch.dtype) -> Any:
    exact = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    update = torch.optim.AdamW(exact.values(), LR, (0.9, 0.95), weight_decay=0.01)
    losses = []
    for batch in batches:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(exact[name].to(dtype))
        model.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            exact[name].grad = p.grad.clone()
        update.step()
    return losses, exact


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=name_of)
def test_steps_compute_with_rounded_weights_and_update_exact_ones(lab: Lab, layout: dict[str, int]) -> None:
    optimizer = {"zero": 3, "clip_grad_norm": None, "weight_decay": 0.01, "lr": LR, "betas": [0.9, 0.95]}
    rest = {"optimizer": optimizer, "precision": {"gather": "bfloat16"}}
    found = lab.run(Case("gpt", layout, rest, job=train))[0]
    entry = families.build("gpt")
    batches = [entry.batch(8, seed) for seed in range(STEPS)]
    losses, exact = one_process(entry.model, batches, entry.loss, torch.bfloat16)
    assert found.losses == pytest.approx(losses, rel=1e-10)
    for name, value in exact.items():
        assert torch.allclose(found.parameters[name].to(value.dtype), value.detach(), rtol=0, atol=1e-9), name
    other, _ = one_process(families.build("gpt").model, batches[:1], entry.loss, torch.float64)
    assert losses[0] != pytest.approx(other[0], rel=1e-6)  # rounding is seen
