"""Models whose weights are reached by other ways than attributes of modules: a copy of them is another model.

Each block is the same small MLP; what differs is who holds its weights. All are to train as the model itself does.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry, tokens

WIDTH, VOCABULARY = 16, 40


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Lambda(Block):
    def __init__(self) -> None:
        super().__init__()
        held = nn.ModuleDict({"up": self.up, "down": self.down})
        self.mlp = lambda x: held["down"](F.gelu(held["up"](x)))


class Patched(Block):
    def __init__(self) -> None:
        super().__init__()
        original = self.forward
        self.forward = lambda x: original(x) * 0.5 + x  # an instance's own forward


class Hooked(Block):
    """A forward hook with an adapter, as fine-tuning libraries put it."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.register_forward_hook(lambda module, args, output: output + self.adapter(output))


class Partial(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = functools.partial(_mlp, up=self.up.weight, down=self.down.weight)


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up)), down)


class View(Block):
    """Views of weights that were made before: they see each update."""

    def __init__(self) -> None:
        super().__init__()
        self.double()  # a cast afterwards would leave the views behind
        self.transposed = self.down.weight.t()
        self.first = [self.up.weight[: 2 * WIDTH]]
        self.stopped = self.down.weight.detach()

    def mlp(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x))
        return wide @ self.transposed + F.linear(x, self.first[0]).mean(-1, keepdim=True) + F.linear(wide, self.stopped)


class Attributes(Block):
    """What nn.Module does not know: plain tensors, what cannot be pickled, a static method."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)
        self.tables = {"shift": torch.linspace(0.0, 1.0, WIDTH, dtype=torch.float64)}
        self.lock = threading.Lock()

    @staticmethod
    def moved(x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    def mlp(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.moved(self.down(F.gelu(self.up(x * self.scale.to(x.device)))), self.tables["shift"])


@dataclasses.dataclass
class Result:
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    """``head``: how the output embedding reaches the table that it is tied to."""

    def __init__(self, block: type[nn.Module] = Block, head: str = "own") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        if head == "own":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        elif head == "lambda":
            self.head = lambda x: x @ self.tokens.weight.t()
        else:
            self.head = functools.partial(F.linear, weight=self.tokens.weight)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return Result(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def _of(block: type[nn.Module] = Block, head: str = "own") -> Callable[[], Entry]:
    return lambda: Entry(Model(block, head), tokens(VOCABULARY), ("labels",))


HELD_WEIGHTS: dict[str, Callable[[], Entry]] = {
    "held-by-lambda": _of(Lambda),
    "held-by-patched-forward": _of(Patched),
    "held-by-hook": _of(Hooked),
    "held-by-partial": _of(Partial),
    "held-by-views": _of(View),
    "held-beside-attributes": _of(Attributes),
    "tied-in-lambda": _of(head="lambda"),
    "tied-in-partial": _of(head="partial"),
}
