"""Models with weights that ask for a gradient and get none: read without gradients, below a detached value, not at all.

The last way reads one block twice, without a gradient and with one: that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry, tokens
from tests.models.held_weights import VOCABULARY, WIDTH, Block

Way = Callable[[nn.ModuleList, Tensor], Tensor]


def _run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def no_grad(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = _run(blocks[:2], x)
    return _run(blocks[2:], x + seen)


def inference_mode(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.inference_mode():
        seen = _run(blocks[:2], x.detach())
    return _run(blocks[2:], x + seen.clone())


def detached(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return _run(blocks[2:], _run(blocks[:2], x).detach())


def unread(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return _run(blocks[2:], x)


def both(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = blocks[0](x)
    return _run(blocks, x + seen)


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(Block() for _ in range(4))
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.way(self.blocks, self.tokens(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _entry(way: Way) -> Entry:
    return Entry(Model(way), tokens(VOCABULARY), ("labels",))


UNTRAINED = {f"untrained:{way.__name__}": partial(_entry, way) for way in (no_grad, inference_mode, detached, unread)}
MODELS = UNTRAINED | {"untrained:both": partial(_entry, both)}
