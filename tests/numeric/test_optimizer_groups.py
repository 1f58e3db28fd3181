"""Groups of the optimizer train as torch's parameter groups do, on every layout: losses, and parameters at the end."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.laboratory import session_lab
from tests.tools.training import Trained, spec_of, trained_alone, trained_on

STEPS = 4
BASE = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_grad_norm": 1.0}
GROUPS = {
    "*embed*": {"lr": 1e-4},
    "*wte*": {"lr": 1e-4},
    "*mlp*weight": {"weight_decay": 0.5, "betas": [0.5, 0.8]},
    "*attn*bias": {"eps": 1e-3, "lr": 3e-3},
    "*experts*": {"lr": 5e-4, "weight_decay": 0.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "tp2": {"mesh": {"tp": 2}},
    "pp2·tp2": {"mesh": {"pp": 2, "tp": 2}},
    "dp2": {"mesh": {"dp": 2}},
    "dp2, zero 0": {"mesh": {"dp": 2}, "optimizer": {"zero": 0}},
    "dp2·tp2, small buckets": {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"bucket_size": 500}},
    "cp2·dp2": {"mesh": {"cp": 2, "dp": 2}},
}


def globs_of(model: nn.Module) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    return {g: keys for g, keys in GROUPS.items() if any(fnmatchcase(n, g) for n in names)}


def alone(name: str, dtype: torch.dtype) -> Trained:
    """Each parameter a group of torch's own, with the keys that are written for it; vectors do not decay."""
    entry = families.build(name)
    model, groups = entry.model.to(dtype), []
    for fqn, p in model.named_parameters():
        keys = {"lr": BASE["lr"], "betas": BASE["betas"], "eps": 1e-8}
        keys["weight_decay"] = BASE["weight_decay"] if p.dim() > 1 else 0.0
        for pattern, changed in GROUPS.items():
            keys |= changed if fnmatchcase(fqn, pattern) else {}
        groups.append({"params": [p], "whole": keys["lr"], **keys})
    update = torch.optim.AdamW(groups)

    def warm_up(step: int) -> None:
        for group in update.param_groups:
            group["lr"] = group["whole"] * min(1.0, (step + 1) / 2)

    return trained_alone(model, entry.loss, batches_of(entry), update, warm_up)


def batches_of(entry: families.Entry) -> list[dict[str, Tensor]]:
    return [entry.batch(8, step) for step in range(STEPS)]


def both(host: Any, name: str, layout: dict[str, Any], dtype: str) -> Any:
    entry = families.build(name)
    optimizer = BASE | {"no_decay": "vectors", "groups": globs_of(entry.model), "schedule": {"warmup": 2}}
    spec = spec_of(entry, dtype=dtype, **{**layout, "optimizer": optimizer | layout.get("optimizer", {})})
    decided = plan_again(entry.model, spec)
    return (
        trained_on(host, decided, batches_of(entry)),
        alone(name, getattr(torch, dtype)),
        {row.name: row.group for row in decided.parameters},
    )


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_groups_train_as_those_of_torch(name: str, layout: str) -> None:
    found, truth, groups = session_lab().call(both, name, LAYOUTS[layout], "float64")
    assert found.losses == pytest.approx(truth.losses, rel=1e-10)
    assert found.furthest(truth.parameters) <= 1e-9
    assert len(set(groups.values())) > 2


@pytest.mark.thorough
@pytest.mark.slow
def test_groups_of_experts_that_may_rest() -> None:
    layout = {"mesh": {"ep": 2, "dp": 2}}
    found, truth, groups = session_lab().call(both, "mixtral", layout, "float32")
    assert found.losses == pytest.approx(truth.losses, rel=3e-6)
    assert any("weight_decay 0" in group for fqn, group in groups.items() if "experts" in fqn)
    assert found.furthest(truth.parameters) <= 1e-4
