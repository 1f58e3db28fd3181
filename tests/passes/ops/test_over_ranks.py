"""Softmax, log-softmax, logsumexp and gather over a dim that is cut, against the same on whole tensors."""

import pytest
import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.over_ranks import cut_gather, cut_log_softmax, cut_logsumexp, cut_softmax
from tests.tools.ranks import Ranks

pytestmark = pytest.mark.check

BATCH, LENGTH = 2, 3


def parts(whole: Tensor, tp: int, dim: int, padded: int) -> list[Tensor]:
    """The ranks' parts; what is added to make ``padded`` elements holds huge numbers, which must not matter."""
    shape = list(whole.shape)
    shape[dim] = padded - shape[dim]
    return list(torch.cat([whole, torch.full(shape, 1e4, dtype=whole.dtype)], dim).chunk(tp, dim))


def on_ranks(
    function, whole: Tensor, tp: int, dim: int, pulled, padded: int
) -> list[tuple[Tensor, Tensor, AxisHandle]]:
    """``function(part, axis)`` on each rank: result, gradient of the part under ``pulled(rank)``, the axis' counts."""
    given = parts(whole, tp, dim, padded)

    def rank_of(rank: int) -> tuple[Tensor, Tensor, AxisHandle]:
        axis = AxisHandle("tp", tp, rank)
        x = given[rank].clone().requires_grad_()
        result = function(x, axis)
        (gradient,) = torch.autograd.grad(result, x, pulled(rank, result))
        return result.detach(), gradient, axis

    return Ranks(tp).run(rank_of)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("size", [16, 13, 5])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_is_the_same_on_every_rank(tp, size, keepdim):
    torch.manual_seed(0)
    whole = (10 * torch.randn(BATCH, LENGTH, size, dtype=torch.float64)).requires_grad_()
    expected = whole.logsumexp(-1, keepdim)
    pulled = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, whole, pulled)
    ran = on_ranks(
        lambda x, axis: cut_logsumexp(x, [-1], keepdim, axis, size), whole.detach(), tp, 2, lambda *_: pulled, 16
    )
    for result, _, axis in ran:
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)
        assert axis.counts["all_reduce", "forward"] == 2
        assert axis.counts["all_reduce", "backward"] == 0
    found = torch.cat([gradient for _, gradient, _ in ran], 2)
    torch.testing.assert_close(found[..., :size], truth, rtol=1e-12, atol=1e-12)
    assert found[..., size:].abs().sum() == 0


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    ("function", "reference"), [(cut_softmax, torch.softmax), (cut_log_softmax, torch.log_softmax)]
)
def test_softmax_is_cut_as_its_input(tp, dim, function, reference):
    torch.manual_seed(0)
    whole = (10 * torch.randn(BATCH, 8, 8, dtype=torch.float64)).requires_grad_()
    expected = reference(whole, dim)
    pulled = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, whole, pulled)
    ran = on_ranks(
        lambda x, axis: function(x, dim, None, axis, 8),
        whole.detach(), tp, dim, lambda rank, _: pulled.chunk(tp, dim)[rank], 8,
    )  # fmt: skip
    torch.testing.assert_close(torch.cat([r for r, _, _ in ran], dim), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([g for _, g, _ in ran], dim), truth, rtol=1e-10, atol=1e-10)
    assert all((a.counts["all_reduce", "forward"], a.counts["all_reduce", "backward"]) == (2, 1) for *_, a in ran)


@pytest.mark.parametrize("function", [cut_softmax, cut_log_softmax])
def test_low_precision_is_summed_in_float32(function):
    torch.manual_seed(0)
    whole = torch.randn(4, 512).bfloat16()
    reference = torch.softmax if function is cut_softmax else torch.log_softmax
    ran = on_ranks(lambda x, axis: function(x, 1, None, axis, 512), whole, 2, 1, lambda _, r: torch.ones_like(r), 512)
    found = torch.cat([result for result, _, _ in ran], 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, reference(whole.float(), 1).bfloat16(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("size", [16, 13])
def test_the_ranks_picks_add_up_to_the_gathered_elements(tp, size):
    torch.manual_seed(0)
    whole = torch.randn(BATCH, size, 3, dtype=torch.float64, requires_grad=True)
    index = torch.randint(size, (BATCH, 5, 3))
    expected = whole.gather(1, index)
    pulled = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, whole, pulled)
    ran = on_ranks(lambda x, axis: cut_gather(x, 1, index, axis, size), whole.detach(), tp, 1, lambda *_: pulled, 16)
    torch.testing.assert_close(sum(result for result, _, _ in ran), expected.detach())
    found = torch.cat([gradient for _, gradient, _ in ran], 1)
    torch.testing.assert_close(found[:, :size], truth)


def test_an_index_beyond_the_true_elements_is_an_error():
    with pytest.raises(RuntimeError, match=r"not in \[0, 5\)"):
        cut_gather(torch.zeros(2, 8), 1, torch.tensor([[5], [0]]), AxisHandle("tp", 1, 0), 5)
