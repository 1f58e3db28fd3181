"""Attention within documents is that of its mask, whatever the mask is; blocks are as large as documents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from passes.ops import documents as ops
from passes.ops.document_blocks import CAUSAL, WHOLE, blocks_of, runs_of
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
    blocks = blocks_of(runs_of(mask))
    area = sum((b.stop - b.first) * (b.end - b.keys) for b in blocks)
    rows, keys = mask.shape[-2:]
    sequences = mask.shape[0] if mask.dim() == 4 else 1
    assert sum(b.stop - b.first for b in blocks) == rows * sequences
    assert area < 0.6 * rows * keys * sequences or name == "few keys"


def test_the_blocks_of_documents_are_the_documents() -> None:
    ids = drawn(3)
    counts = sizes(ids)
    for mask, band in ((same(ids) & causal(), CAUSAL), (same(ids), WHOLE)):
        blocks = blocks_of(runs_of(mask))
        assert [b.stop - b.first for b in blocks] == counts
        assert {b.band for b in blocks if b.stop - b.first > 1} == {band}


@pytest.mark.parametrize("name", ["a bias", "of heads", "rows without keys"])
def test_a_mask_of_another_form_has_no_blocks(name: str) -> None:
    assert blocks_of(runs_of(OTHERS[name](1))) == []


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


# ---- a mask of which some rows are computed at a time


def of_ids(mask: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], ids: Tensor, rows: Tensor) -> tuple[Any, Any]:
    """A mask [b, 1, rows, s] of the documents and places of ``rows`` and of all keys: its rows, and their inputs."""
    places = torch.arange(ids.shape[1])
    inputs = [ids[:, None, rows, None], ids[:, None, None, :], places[rows, None], places]
    shape = (len(ids), 1, len(rows), ids.shape[1])
    return ops.MaskRows(lambda *given: (mask(*given),), (True, False, True, False), shape), inputs


IN_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "causal": lambda own, other, at, key: (own == other) & (key <= at),
    "whole": lambda own, other, at, key: own == other,
    "window": lambda own, other, at, key: (own == other) & (key <= at) & (key > at - 3),
    "both sides": lambda own, other, at, key: (own == other) & ((key - at).abs() <= 2),
    "addends": lambda own, other, at, key: addends((own == other) & (key <= at), -torch.inf),
    "a bias": lambda own, other, at, key: addends((own == other) & (key <= at), -1.0),
    "every second key": lambda own, other, at, key: (own == other) & ((key - at) % 2 == 0),
}
ROWS = {
    "all rows": torch.arange(LENGTH),
    "two chunks": torch.cat([torch.arange(6, 12), torch.arange(12, 18)]),
    "first and last": torch.cat([torch.arange(6), torch.arange(18, 24)]),
}


@pytest.mark.parametrize("tile", [1, 60, 1 << 22])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", IN_ROWS)
def test_a_mask_by_rows_is_the_attention_of_the_whole_mask(
    name: str, rows: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "TILE", tile)
    for seed in range(3):
        mask, inputs = of_ids(IN_ROWS[name], drawn(seed), ROWS[rows])
        truth_of = mask.at(inputs, mask.whole)
        found, wanted = operands(truth_of, seed, GROUPS), operands(truth_of, seed, GROUPS)
        runs, options = ops.runs_of_rows(mask, inputs), {"scale": 0.3, "enable_gqa": True}
        ours = attention_by_documents(*found, runs, 6, rows=mask, inputs=inputs, **options)  # pyright: ignore
        truth = F.scaled_dot_product_attention(*wanted, truth_of, **options)  # pyright: ignore
        weight = torch.randn(truth.shape, dtype=torch.float64)
        (ours * weight).sum().backward()
        (truth * weight).sum().backward()
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


class Largest(TorchDispatchMode):
    """Owns the elements of the largest tensor that any op made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *made])
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_rank_of_cp_makes_nothing_of_the_square_of_32k_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks 3 and 12 of the 16 of cp 8, documents of 5,000 tokens."""
    monkeypatch.undo()
    length, cp = 32768, 8
    chunks = torch.arange(length).view(2 * cp, -1)
    mask, inputs = of_ids(IN_ROWS[name], torch.arange(length)[None] // 5000, chunks[[3, 12]].flatten())
    shapes = [(1, 1, length // cp, 4), (1, 1, length, 4), (1, 1, length, 4)]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with Largest() as largest:
        runs = ops.runs_of_rows(mask, inputs)
        attention_by_documents(*given, runs, 5000, rows=mask, inputs=inputs).sum().backward()
    assert 0 < largest.elements < length**2 // cp // 16
