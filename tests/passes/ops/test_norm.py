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


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_epsilon_is_that_of_the_dtype_that_the_norm_computes_in(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e-4, -1e-4]], dtype=dtype)
    found = cut_rms_norm(x, None, None, AxisHandle("tp", 1, 0), 2)
    torch.testing.assert_close(found, F.rms_norm(x, [2]))


@pytest.mark.parametrize("of_weight", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_of_half_precision_is_rounded_once_whatever_its_weight(
    kind: str, dtype: torch.dtype, of_weight: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    x, *vectors = torch.randn(1000, FEATURES, dtype=dtype), *torch.randn(2, FEATURES, dtype=of_weight or dtype)
    found = cut(kind, AxisHandle("tp", 1, 0), x, *vectors)
    expected = whole(kind, x, *vectors)
    assert found.dtype == expected.dtype == dtype
    assert (found != expected).float().mean() < 0.01
