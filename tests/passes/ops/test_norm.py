"""Norms over features that are cut, against the same on whole tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.over_ranks import cut_layer_norm, cut_rms_norm
from tests.tools.ranks import Ranks

FEATURES, EPS = 8, 1e-3


def whole(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind == "layer_norm":
        return F.layer_norm(x, [FEATURES], weight, bias, EPS)
    return F.rms_norm(x, [FEATURES], weight, EPS)


def cut(kind: str, axis: AxisHandle, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if kind == "layer_norm":
        return cut_layer_norm(x, weight, bias, EPS, axis, FEATURES)
    return cut_rms_norm(x, weight, EPS, axis, FEATURES)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("kind", "exchanges"), [("layer_norm", 2), ("rms_norm", 1)])
@pytest.mark.parametrize("scaled", [True, False])
def test_values_and_gradients_are_those_of_the_whole_norm(tp, kind, exchanges, scaled):
    torch.manual_seed(0)
    given = [3 + torch.randn(2, 5, FEATURES, dtype=torch.float64)]
    if scaled:
        given += [torch.randn(FEATURES, dtype=torch.float64) for _ in range(2 if kind == "layer_norm" else 1)]
    missing = [None] * (3 - len(given))
    leaves = [t.clone().requires_grad_() for t in given]
    expected = whole(kind, *leaves, *missing)
    pulled = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, leaves, pulled)

    def rank_of(rank: int) -> tuple[Tensor, tuple[Tensor, ...], AxisHandle]:
        axis = AxisHandle("tp", tp, rank)
        mine = [t.chunk(tp, -1)[rank].clone().requires_grad_() for t in given]
        result = cut(kind, axis, *mine, *missing)
        return result.detach(), torch.autograd.grad(result, mine, pulled.chunk(tp, -1)[rank]), axis

    ran = Ranks(tp).run(rank_of)
    torch.testing.assert_close(torch.cat([r for r, _, _ in ran], -1), expected.detach(), rtol=1e-12, atol=1e-12)
    for position, gradient in enumerate(truth):
        found = torch.cat([gradients[position] for _, gradients, _ in ran], -1)
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
    for *_, axis in ran:
        assert axis.counts["all_reduce", "forward"] == axis.counts["all_reduce", "backward"] == exchanges


def test_the_default_epsilon_is_that_of_the_input_s_dtype():
    x = torch.tensor([[1e-4, -1e-4]])
    found = cut_rms_norm(x, None, None, AxisHandle("tp", 1, 0), 2)
    torch.testing.assert_close(found, F.rms_norm(x, [2]))
