"""Losses by ops that have no rule: written out if known, else refused, as nothing says how they add up."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner import PlanError, plan
from runtime import Engine

OPTIONS: Any = getattr(nn, "LinearCrossEntropyOptions", None)
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"ids": {"shape": [6], "dtype": "int64", "high": 32}, "labels": {"like": "ids"}},
}


class Head(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.reduction = reduction
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        options: Any = {"linear_bias": self.head.bias, "reduction": self.reduction, "options": OPTIONS()}
        x = self.embed(ids).flatten(0, 1)
        return F.linear_cross_entropy(x, self.head.weight, labels.flatten(), **options).sum()


@torch.library.custom_op("planner_tests::mean_over_all", mutates_args=())
def mean_over_all(x: Tensor, keep: Tensor) -> Tensor:
    return (x.square().mean(-1) * keep).sum() / keep.sum()


@mean_over_all.register_fake
def _(x: Tensor, keep: Tensor) -> Tensor:
    return x.new_empty(())


mean_over_all.register_autograd(
    lambda ctx, g: (g * ctx.kept, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", torch.zeros_like(inputs[0])),
)


class OwnMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return mean_over_all(self.embed(ids), (labels != -100).to(torch.float32))


def batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(32, (4, 6), generator=drawn) for _ in range(2))
    labels[0], labels[1, 2:] = -100, -100
    return {"ids": ids, "labels": labels}


@pytest.mark.skipif(OPTIONS is None, reason="torch has no F.linear_cross_entropy with options")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_in_chunks_is_that_of_the_global_batch(reduction: str) -> None:
    engine, alone = Engine(plan(Head(reduction), SPEC)), Head(reduction)
    loss = alone(**batch())
    loss.backward()
    assert engine.forward_backward(batch()) == pytest.approx(loss.item(), rel=1e-10)
    for name, found in engine.gather_gradients().items():
        wanted = alone.get_parameter(name).grad
        assert wanted is not None
        assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-9), name


def test_a_mean_by_an_op_without_a_rule_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError, match=r"mean_over_all\.default, an op without a rule") as refused:
        plan(OwnMean(), SPEC)
    assert "return mean_over_all(" in str(refused.value)
    assert plan(OwnMean(), {**SPEC, "batch": {"global": 2, "micro": 2}}).parameters
