"""Attention within documents is that of its mask, whatever the mask is; blocks are as large as documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from passes.ops import documents as ops
from passes.ops.document_blocks import CAUSAL, WHOLE, blocks_of
from passes.ops.documents import attention_by_documents

HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 24, 8


@pytest.fixture(autouse=True)
def every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "CALL", 0)


def drawn(seed: int, rows: int = 2) -> Tensor:
    """The number of each token's document, in random documents of 1 token to all."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, LENGTH, generator=draw) < 0.2).long().cumsum(-1)


def sizes(ids: Tensor) -> list[int]:
    """Of all documents, sequence by sequence."""
    return [int(n) for row in ids for n in row.unique_consecutive(return_counts=True)[1]]


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def window(size: int, after: int = 0) -> Tensor:
    """``size`` keys up to each row's own, and ``after`` behind it."""
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(after).triu(1 - size)


def addends(seen: Tensor, low: float) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, low)


MASKS: dict[str, Callable[[int], Tensor]] = {
    "causal": lambda seed: same(drawn(seed)) & causal(),
    "whole": lambda seed: same(drawn(seed)),
    "window": lambda seed: same(drawn(seed)) & window(3),
    "both sides": lambda seed: same(drawn(seed)) & window(3, 2),
    "rows of windows": lambda seed: (same(drawn(seed)) & window(5))[:, :, LENGTH // 3 :],
    "one sequence": lambda seed: same(drawn(seed, 1)) & causal(),
    "two dims": lambda seed: (same(drawn(seed, 1)) & causal())[0, 0],
    "addends": lambda seed: addends(same(drawn(seed)) & causal(), torch.finfo(torch.float64).min),
    "infinite": lambda seed: addends(same(drawn(seed)) & causal(), -torch.inf),
    "some rows": lambda seed: (same(drawn(seed)) & causal())[:, :, torch.tensor([0, 1, 2, 3, 9, 10, 20, 21, 22, 23])],
    "few keys": lambda seed: same(drawn(seed))[:, :, :, :9] | causal()[:, :9],
}
OTHERS: dict[str, Callable[[int], Tensor]] = {
    "a bias": lambda seed: addends(same(drawn(seed)) & causal(), -1.0),
    "of heads": lambda seed: (same(drawn(seed)) & causal()).expand(-1, HEADS, -1, -1).clone(),
    "rows without keys": lambda seed: addends(same(drawn(seed)) & causal() & (torch.arange(LENGTH) > 2), -1e308),
    "noise": lambda seed: torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.7,
}


def operands(mask: Tensor, seed: int, groups: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows, keys = mask.shape[-2:]
    shapes = [(2, HEADS, rows, WIDTH), (2, groups, keys, WIDTH), (2, groups, keys, WIDTH)]
    return [torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("name", [*MASKS, *OTHERS])
def test_it_is_the_attention_of_its_mask(name: str, groups: int) -> None:
    for seed in range(5):
        mask = (MASKS | OTHERS)[name](seed)
        found, wanted = operands(mask, seed, groups), operands(mask, seed, groups)
        options: dict[str, Any] = {"scale": 0.3, "enable_gqa": groups != HEADS}
        ours = attention_by_documents(*found, mask, 6, **options)
        truth = F.scaled_dot_product_attention(*wanted, mask, **options)
        weight = torch.randn(truth.shape, dtype=torch.float64)
        (ours * weight).sum().backward()
        (truth * weight).sum().backward()
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_read_off_the_mask(name: str) -> None:
    mask = MASKS[name](1)
    blocks = blocks_of(mask)
    area = sum((b.stop - b.first) * (b.end - b.keys) for b in blocks)
    rows, keys = mask.shape[-2:]
    sequences = mask.shape[0] if mask.dim() == 4 else 1
    assert sum(b.stop - b.first for b in blocks) == rows * sequences
    assert area < 0.6 * rows * keys * sequences or name == "few keys"


def test_the_blocks_of_documents_are_the_documents() -> None:
    ids = drawn(3)
    counts = sizes(ids)
    for mask, band in ((same(ids) & causal(), CAUSAL), (same(ids), WHOLE)):
        blocks = blocks_of(mask)
        assert [b.stop - b.first for b in blocks] == counts
        assert {b.band for b in blocks if b.stop - b.first > 1} == {band}


@pytest.mark.parametrize("name", ["a bias", "of heads", "rows without keys"])
def test_a_mask_of_another_form_has_no_blocks(name: str) -> None:
    assert blocks_of(OTHERS[name](1)) == []


def test_products_are_those_of_the_documents_alone() -> None:
    """Two products of n² pairs forward, four backward, as plain attention computes them."""
    ids = drawn(5)
    mask = same(ids) & causal()
    given = operands(mask, 1)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        attention_by_documents(*given, mask, 6).sum().backward()
    assert counter.get_total_flops() == 6 * 2 * HEADS * WIDTH * sum(n**2 for n in sizes(ids))


def test_small_blocks_are_not_worth_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    attended = ops._attended
    monkeypatch.setattr(ops, "_attended", lambda *given: calls.append(given) or attended(*given))
    mask = same(drawn(1)) & causal()
    for cost, is_apart in ((0, True), (1 << 15, False)):
        calls.clear()
        monkeypatch.setattr(ops, "CALL", cost)
        attention_by_documents(*operands(mask, 1), mask, 6)
        assert bool(calls) is is_apart


def test_operands_without_values_are_of_equal_documents() -> None:
    mask = torch.empty(2, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")
    given = [x.detach().to("meta") for x in operands(mask, 1)]
    counter = FlopCounterMode(display=False)
    with counter:
        found = attention_by_documents(*given, mask, 6)
    assert found.shape == (2, HEADS, LENGTH, WIDTH)
    assert counter.get_total_flops() == 2 * 2 * 2 * HEADS * WIDTH * LENGTH * 6
