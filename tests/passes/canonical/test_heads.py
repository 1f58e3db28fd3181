"""Heads computed one by one become one attention, with any op between whose rule keeps other dims apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.capture.export import capture
from tests.models.one_body import WIDTH, OneBody, assert_capture_equals, batch

Weigh = Callable[[Tensor], Tensor]
HEADS, SIZE = 4, 3
JOINED: dict[str, Weigh] = {
    "softmax": lambda scores: scores.softmax(-1),
    "over its largest": lambda scores: scores * scores.amax(-1, keepdim=True).tanh(),
    "over a sum": lambda scores: scores / (scores.square().sum(1, keepdim=True) + 1),
    "cumulative": lambda scores: scores.tanh().cumsum(-1),
    "cumulative products": lambda scores: scores.tanh().cumprod(1),
    "over logsumexp": lambda scores: scores * scores.logsumexp(-1, True).tanh(),
    "triangle": lambda scores: scores.tril(),
}
LEFT = {"triangle"}  # tril names no dims


class OneByOne(OneBody):
    def __init__(self, weigh: Weigh) -> None:
        super().__init__(lambda _, x: x)
        self.weigh = weigh
        self.parts = nn.ModuleList(nn.Linear(WIDTH, SIZE, bias=False) for _ in range(3 * HEADS))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.body = OneByOne.heads
        self.double()

    def heads(self, x: Tensor) -> Tensor:
        three = [tuple(part(x) for part in self.parts[3 * i : 3 * i + 3]) for i in range(HEADS)]
        return self.out(torch.cat([self.weigh(q @ k.mT) @ v for q, k, v in three], -1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", JOINED)
def test_heads_one_by_one_are_one_product_and_compute_the_same(name: str):
    model = OneByOne(JOINED[name])
    assert_capture_equals(model)
    targets = [str(n.target) for n in capture(model, batch()).graph.graph.nodes]
    is_left = sum("linear" in t or "matmul" in t or "bmm" in t for t in targets) > HEADS
    assert is_left == (name in LEFT)
