"""What each row of a mask allows, without the mask: the same as the mask says, or nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.canonical.masks import MaskRows, Runs, simplify_masks
from passes.program.known_values import Constants
from passes.program.program import Program
from planner.capture.export import capture

aten = torch.ops.aten
Mask = Callable[[Tensor, Tensor], Tensor]  # of the places of queries [s, 1] and of keys [1, s]

KNOWN: dict[str, Mask] = {
    "causal": lambda q, k: k <= q,
    "causal, the other way round": lambda q, k: q >= k,
    "later ones": lambda q, k: q < k,
    "itself": lambda q, k: q == k,
    "a window": lambda q, k: (k <= q) & (k > q - 5),
    "a window by distance": lambda q, k: (q - k >= 0) & (q - k < 5),
    "not later ones": lambda q, k: ~(k > q),
    "documents that are one": lambda q, k: (q * 0 == k * 0) & (k <= q),
    "two documents": lambda q, k: (q // 8 == k // 8) & (k <= q),
    "a prefix for all": lambda q, k: (k < 6) | (k <= q),
    "some queries see nothing": lambda q, k: (q > 4) & (k <= q),
    "a triangle": lambda q, k: torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(1),
    "for each sequence": lambda q, k: (k <= q).expand(2, 1, len(q), k.shape[1]),
    "all": lambda q, k: (q >= 0).expand(len(q), k.shape[1]),
}
UNKNOWN: dict[str, Mask] = {
    "every second one": lambda q, k: (k % 2 == 0) & (k <= q),
    "neither before nor behind": lambda q, k: ~((k > q) | (k < 4)),
    "a hole": lambda q, k: (k < 3) | (k > q),
    "no order among keys": lambda q, k: (k * 7 % 5) <= q,
    "by real numbers": lambda q, k: k.double() <= q.double(),
    "the other triangle": lambda q, k: torch.ones(len(q), k.shape[1], dtype=torch.bool).triu(),
}


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.up, self.mask = nn.Linear(8, 8), mask

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        h = self.up(x).unsqueeze(1)
        mask = self.mask(places[:, None], places[None, :])
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).square().mean()


def captured(mask: Mask, length: int) -> tuple[Program, torch.fx.Node]:
    program = capture(Attention(mask), {"x": torch.empty(2, length, 8, device="meta")})
    (attention,) = program.graph.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return program, attention


def runs_of(mask: Mask, length: int) -> tuple[Runs | None, Tensor]:
    """What is known of the rows, and the mask."""
    program, attention = captured(mask, length)
    constants = Constants(program)
    value = constants.value(attention.args[3])  # pyright: ignore[reportArgumentType]
    assert value is not None
    return MaskRows(constants).of(attention.args[3]), value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [3, 16])
@pytest.mark.parametrize("mask", KNOWN.values(), ids=KNOWN)
def test_runs_are_what_the_mask_allows(mask, length):
    runs, value = runs_of(mask, length)
    assert runs is not None
    places = torch.arange(length)
    allowed = (places >= runs.first[:, None]) & (places < runs.stop[:, None])
    assert torch.equal(allowed.expand(value.shape), value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", UNKNOWN.values(), ids=UNKNOWN)
def test_of_what_is_no_run_nothing_is_claimed(mask):
    runs, _ = runs_of(mask, 16)
    assert runs is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [1 << 17, 1 << 20])
@pytest.mark.parametrize("name", ["causal", "documents that are one", "all", "a window", "two documents"])
def test_of_a_mask_too_large_to_compute_it_is_known_whether_it_says_anything(name, length):
    program, attention = captured(KNOWN[name], length)
    simplify_masks(program)
    is_causal = len(attention.args) > 5 and attention.args[5]
    says = attention.args[3] is not None
    assert (says, is_causal) == {"all": (False, False), "a window": (True, False), "two documents": (True, False)}.get(
        name, (False, True)
    )
