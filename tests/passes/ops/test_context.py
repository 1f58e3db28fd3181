"""What ranks of cp exchange, and their causal attention, against one process that has the whole sequence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from passes.ops.attention import causal_attention, shared_key_causal_attention
from passes.ops.axis import AxisHandle
from passes.ops.context import gather_sequence, local_rows
from passes.ops.gathered_attention import gathered_attention
from tests.tools import zigzag
from tests.tools.cudnn_stand_in import stand_in
from tests.tools.examples import examples
from tests.tools.ranks import Ranks

pytestmark = pytest.mark.check

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CAUSAL = [("flash", True), ("flash", False), ("masks", True), ("masks", False)]


class Called(TorchDispatchMode):
    """Adds the ops that are called to ``ops``."""

    def __init__(self, ops: set[Any]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def attention(mine: list[Tensor], axis: AxisHandle, how: str, local: bool, scale: float | None) -> Tensor:
    q, k, v = mine
    options: dict[str, Any] = {"scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
    if how == "masks":  # operands whose features lie apart: no kernel takes them
        q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    if local:
        return gathered_attention(q, k, v, None, axis, is_causal=True, **options)
    k, v = gather_sequence(k, 2, axis), gather_sequence(v, 2, axis)
    if how == "masks":
        k, v = (t.mT.contiguous().mT for t in (k, v))
    return causal_attention(q, k, v, axis, **options)


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_gathered_sequence_is_whole_and_in_order_and_its_gradients_are_summed(cp, dim):
    x, pulled = (torch.randn(12, 12, 12, dtype=torch.float64) for _ in range(2))

    def run(rank: int) -> tuple[Tensor, ...]:
        axis = AxisHandle("cp", cp, rank)
        mine = leaf(local_rows(x, dim, axis))
        whole = gather_sequence(mine, dim, axis)
        (gradient,) = torch.autograd.grad(whole, mine, (rank + 1) * pulled)
        once = {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}
        assert axis.counts == (once if cp > 1 else {})
        assert all(n == x.numel() * 8 for n in axis.bytes.values())
        return whole, gradient, local_rows(pulled, dim, axis) * (cp * (cp + 1) / 2)

    for whole, gradient, expected in Ranks(cp).run(run):
        assert torch.equal(whole, x)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_local_rows_are_the_places_of_a_rank_and_their_gradient_stands_there_among_zeros(cp):
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    total = torch.zeros_like(x)
    for rank in range(cp):
        own = local_rows(x, 1, AxisHandle("cp", cp, rank))
        assert torch.equal(own, x[:, zigzag.places(12, cp, rank)])
        total += torch.autograd.grad(own.square().sum(), x)[0]
    torch.testing.assert_close(total, 2 * x.detach())


@examples(25)
@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]), st.integers(1, 9),
    st.sampled_from([None, 0.3]), st.sampled_from(CAUSAL), st.integers(0, 99),
)  # fmt: skip
def test_causal_attention_of_ranks_is_that_of_the_whole(cp, length, heads, features, scale, how, seed):
    size, generator = 2 * cp * length, torch.Generator().manual_seed(seed)
    shapes = [(2, heads[i], size, features) for i in (0, 1, 1)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads[0] != heads[1])
    pulled = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    truth = (out.detach(), *torch.autograd.grad(out, (q, k, v), pulled))

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        axis = AxisHandle("cp", cp, rank)
        mine = [leaf(local_rows(t, 2, axis)) for t in (q, k, v)]
        y = attention(mine, axis, how[0], how[1], scale)
        found = (y.detach(), *torch.autograd.grad(y, mine, local_rows(pulled, 2, axis)))
        meetings = 3 if how[1] else 4  # keys and values are in one, and it is gathered twice; or each is gathered once
        assert sum(axis.counts.values()) == (meetings if cp > 1 else 0)
        return list(zip(found, (local_rows(t, 2, axis) for t in truth), strict=True))

    for found, expected in (pair for pairs in Ranks(cp).run(run) for pair in pairs):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


WIDTHS = {"of one width": (6, 6), "narrower values": (6, 4), "wider values": (4, 6)}


def _beside_the_whole(kernel: str, mask: Tensor | None, local: bool, widths: tuple[int, int]) -> set[Any]:
    """Results and gradients of two ranks; the ops that they call."""
    cp, generator = 2, torch.Generator().manual_seed(0)
    shapes = [(2, heads, 16, width) for heads, width in zip((4, 2, 2), (widths[0], *widths), strict=True)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    truth = (out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach()))

    ops: set[Any] = set()

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        with Called(ops):
            return of_rank(rank)

    def of_rank(rank: int) -> list[tuple[Tensor, Tensor]]:
        axis = AxisHandle("cp", cp, rank)
        mine = [leaf(local_rows(t, 2, axis)) for t in (q, k, v)]
        options: dict[str, Any] = {"enable_gqa": True, "kernel": kernel}
        if local:
            rows = None if mask is None else local_rows(mask, mask.dim() - 2, axis)
            y = gathered_attention(mine[0], mine[1], mine[2], rows, axis, is_causal=mask is None, **options)
        else:
            whole = [gather_sequence(t, 2, axis) for t in mine[1:]]
            y = causal_attention(mine[0], whole[0], whole[1], axis, **options)
        found = (y.detach(), *torch.autograd.grad(y, mine, y.detach()))
        return list(zip(found, (local_rows(t, 2, axis) for t in truth), strict=True))

    for found, expected in (pair for pairs in Ranks(cp).run(run) for pair in pairs):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    return ops


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("local", [True, False])
def test_parts_by_cudnn_are_merged_and_have_the_gradients_of_the_whole(local: bool, widths: str) -> None:
    with stand_in():
        ops = _beside_the_whole("cudnn", None, local, WIDTHS[widths])
    assert (CUDNN in ops, FLASH in ops) == (True, False)


@pytest.mark.parametrize("shape", [(16, 16), (2, 1, 16, 16), (2, 4, 16, 16)])
def test_cudnn_takes_masks(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(0)) > -1
    with stand_in():
        assert CUDNN in _beside_the_whole("cudnn", mask, True, (6, 4))


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("local", [True, False])
def test_flash_takes_values_of_another_width_than_keys_without_a_mask_of_rows_and_keys(
    local: bool, widths: str
) -> None:
    ops = _beside_the_whole("flash", None, local, WIDTHS[widths])
    assert FLASH in ops
    assert aten.ge.Tensor not in ops  # of which a causal mask is made


MASKS = {"none": (), "of the rows": (12, 12), "of heads": (4, 12, 12), "of the batch": (2, 1, 1, 12), "true": (12, 12)}


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_mask_of_keys_that_are_gathered_again_is_that_of_the_whole(mask, contiguous):
    cp, generator = 2, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 12, 4, dtype=torch.float64, generator=generator).requires_grad_() for h in (4, 2, 2))
    hidden = torch.randn(MASKS[mask], dtype=torch.float64, generator=generator) if MASKS[mask] else None
    hidden = hidden > -1 if hidden is not None and mask == "true" else hidden
    out = F.scaled_dot_product_attention(q, k, v, hidden, enable_gqa=True)
    truth = (out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach()))

    def run(rank: int) -> list[tuple[Tensor, Tensor]]:
        axis = AxisHandle("cp", cp, rank)
        mine = [leaf(local_rows(t, 2, axis)) for t in (q, k, v)]
        given = [t if contiguous else t.mT.contiguous().mT for t in mine]
        rows = hidden if hidden is None or hidden.shape[-2] == 1 else local_rows(hidden, hidden.dim() - 2, axis)
        y = gathered_attention(given[0], given[1], given[2], rows, axis, enable_gqa=True)
        found = (y.detach(), *torch.autograd.grad(y, mine, y.detach()))
        assert axis.counts == {
            ("all_gather", "forward"): 1,
            ("all_gather", "backward"): 1,
            ("reduce_scatter", "backward"): 1,
        }
        assert {size for _, size in axis.bytes.items()} == {(k.numel() + v.numel()) * 8}
        return list(zip(found, (local_rows(t, 2, axis) for t in truth), strict=True))

    for found, expected in (pair for pairs in Ranks(cp).run(run) for pair in pairs):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_merged_in_no_less_than_float32(dtype):
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64) for _ in range(3))
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    alone = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True)
    axis = AxisHandle("cp", 4, 3)
    out = causal_attention(local_rows(q, 2, axis).to(dtype), k.to(dtype), v.to(dtype), axis)
    assert out.dtype == dtype
    error, usual = (out - local_rows(truth, 2, axis)).abs().max(), (alone - truth).abs().max()
    assert error <= 2 * usual


def test_dropout_drops_and_scales():
    q, k = torch.zeros(1, 1, 32, 4), torch.zeros(1, 1, 64, 4)
    out = causal_attention(q, k, torch.ones_like(k), AxisHandle("cp", 2, 1), dropout_p=0.5)
    assert out.min() < 0.9 < 1.1 < out.max()
    assert abs(out.mean() - 1) < 0.2


class _Work(TorchDispatchMode):
    """Counts the products of queries and keys that flash attention is asked for: of a causal square its lower half."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FLASH:
            (rows, keys), is_causal = (t.shape[2] for t in args[:2]), len(args) > 4 and args[4]  # defaults are left out
            self.pairs += rows * (rows + 1) // 2 if is_causal else rows * keys
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            self.largest = max(self.largest, value.numel() if isinstance(value, Tensor) else 0)
        return result


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ranks_have_the_same_work_and_none_makes_a_mask(cp):
    size, found = 256, []
    for rank in range(cp):
        q, k, v = (torch.zeros(1, 1, n, 4) for n in (size // cp, size, size))
        with _Work() as work:
            causal_attention(q, k, v, AxisHandle("cp", cp, rank))
        found.append(work.pairs)
        assert work.pairs == zigzag.pairs(size, cp, rank)
        assert work.largest <= size * 4
    assert max(found) <= 1.05 * min(found)
    assert sum(found) == size * (size + 1) // 2


def test_keys_of_the_whole_sequence_are_not_kept_for_the_backward():
    def lengths_kept(rank: int) -> list[set[int]]:
        axis, found = AxisHandle("cp", 2, rank), []
        for local in (True, False):
            mine = [torch.randn(1, 2, 16, 4, requires_grad=True) for _ in range(3)]
            kept: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape[2]), lambda t: t):
                attention(mine, axis, "flash", local, None)
            found.append(set(kept))
        return found

    assert Ranks(2).run(lengths_kept) == [[{16}, {16, 32}]] * 2


@pytest.mark.parametrize("key_heads", [1, 2])
def test_causal_attention_of_fewer_key_heads_than_ranks(key_heads):
    q, (k, v) = torch.randn(1, 8, 8, 4), (torch.randn(1, key_heads, 16, 4) for _ in range(2))
    cp, options = AxisHandle("cp", 2, 1), dict[str, Any]({"enable_gqa": True, "scale": 0.3})
    truth = causal_attention(q, k, v, cp, **options).chunk(4, 1)
    for rank, expected in enumerate(truth):
        own = q.chunk(4, 1)[rank]
        found = shared_key_causal_attention(own, k, v, AxisHandle("tp", 4, rank), cp, **options)
        torch.testing.assert_close(found, expected)
