"""Models with flex_attention compute what the same attention written out computes, in each layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from planner import PlanError, plan
from tests.tools.simulated_mesh import equals_one_process
from tests.tools.simulated_ranks import built

WIDTH, LENGTH, HEADS = 16, 16, 4


def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


class Attention(nn.Module):
    """``is_flex``: by flex_attention; else its scores [b, h, t, t] and mask are written out."""

    def __init__(self, kind: str, is_flex: bool) -> None:
        super().__init__()
        self.kind, self.is_flex = kind, is_flex
        self.key_heads = 2 if kind == "grouped" else HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * self.key_heads * WIDTH // HEADS)
        self.slope = nn.Parameter(torch.linspace(0.1, 0.4, HEADS))
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, kv = self.q(x).unflatten(-1, (HEADS, -1)), self.kv(x).unflatten(-1, (self.key_heads, -1))
        q, k, v = (z.transpose(1, 2) for z in (q, *kv.chunk(2, -1)))
        y = self._by_flex(q, k, v, ids) if self.is_flex else self._written_out(q, k, v, ids)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def _by_flex(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        document, slope = (ids == 0).cumsum(1), self.slope

        def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[b, i] == document[b, j])

        def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + slope[h] * (j - i)

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 2 * torch.tanh(score / 2)

        mask = create_block_mask(before, None, None, LENGTH, LENGTH, device=ids.device)
        if self.kind == "documents":
            mask = create_block_mask(same, len(ids), None, LENGTH, LENGTH, device=ids.device)
        change = {"slopes": nearer, "capped": capped}.get(self.kind)
        wanted = None if self.kind == "everything" else mask
        return flex_attention(q, k, v, change, wanted, enable_gqa=self.kind == "grouped")  # pyright: ignore

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        k, v = (z.repeat_interleave(HEADS // self.key_heads, 1) for z in (k, v))
        at, document = torch.arange(LENGTH), (ids == 0).cumsum(1)
        scores, allowed = q @ k.mT / (WIDTH / HEADS) ** 0.5, at[:, None] >= at
        if self.kind == "slopes":
            scores = scores + self.slope[:, None, None] * (at - at[:, None])
        if self.kind == "capped":
            scores = 2 * torch.tanh(scores / 2)
        if self.kind == "documents":
            allowed = allowed & (document[:, :, None] == document[:, None])[:, None]
        if self.kind != "everything":
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v


KINDS = ("causal", "documents", "slopes", "capped", "grouped", "everything")
LAYOUTS: tuple[dict[str, int], ...] = ({}, {"tp": 2}, {"cp": 2})


@pytest.mark.sampled(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_the_attention_written_out(kind: str, mesh: dict[str, int]) -> None:
    by_flex, written_out = (partial(built, partial(Attention, kind, is_flex)) for is_flex in (True, False))
    ids = torch.randint(0, 6, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "labels": ids.roll(1, 1)}
    equals_one_process(by_flex, batch, mesh, truth=written_out, each=(1e-8, 1e-12))


class Outside(Attention):
    """``mask``: made before the forward."""

    def __init__(self, mask: BlockMask) -> None:
        super().__init__("causal", is_flex=True)
        self.mask = mask

    def _by_flex(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=self.mask)  # pyright: ignore


def listed(blocks: list[list[int]], mask_mod: Callable[..., Tensor] | None) -> BlockMask:
    """Of blocks of 8 × 8: those of keys that each block of queries attends to."""
    count = torch.tensor([[[len(row) for row in blocks]]], dtype=torch.int32)
    index = torch.tensor([[[[*row, 0, 0][:2] for row in blocks]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=8, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))


SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 2, "micro": 2},
    "inputs": {"ids": {"shape": [LENGTH], "dtype": "int64", "high": 32}, "labels": {"like": "ids"}},
}


@pytest.mark.parametrize(
    ("blocks", "mask_mod"), [([[0], [1]], before), ([[1], [0]], None)], ids=["too few", "without a mask_mod"]
)
def test_blocks_that_are_not_those_of_the_mask_are_refused(blocks: Any, mask_mod: Any) -> None:
    with pytest.raises(PlanError, match="may allow other keys than its mask_mod") as refused:
        plan(Outside(listed(blocks, mask_mod)), SPEC)
    assert "return flex_attention(q, k, v" in str(refused.value)


@pytest.mark.thorough
def test_a_mask_made_before_the_forward_may_list_its_blocks() -> None:
    assert plan(Outside(listed([[0], [0, 1]], before)), SPEC).parameters
    assert plan(Outside(create_block_mask(before, None, None, LENGTH, LENGTH, device="cpu")), SPEC).parameters
