"""A forward of several sequences shows what a graph of one does not: a warning, or the numbers of one batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import capture, plan
from runtime import Engine
from tests.tools.limits import HANG_SECONDS

SPEC = {
    "mesh": {"dp": 1},
    "batch": {"global": 8, "micro": 1},
    "inputs": {"ids": {"shape": [8], "dtype": "int64", "high": 32}, "labels": {"like": "ids"}},
}


class Net(nn.Module):
    def __init__(
        self, middle: Callable[[Tensor], Tensor] = lambda x: x, read: Callable[[Tensor], Tensor] = lambda i: i
    ):
        super().__init__()
        self.tokens, self.up, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.middle, self.read = middle, read

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(self.read(ids))
        x = self.middle(x + F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def minus_the_first(x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    return (y - y[:, :1]).transpose(0, 1)


def along_all(x: Tensor) -> Tensor:
    return x + x.reshape(1, -1, 16).cumsum(1).view_as(x)


def halves(x: Tensor) -> Tensor:
    if len(x) == 1:
        return x
    a, b = x.tensor_split(2)
    return torch.cat([a - b, a + b])


def small_batches(x: Tensor) -> Tensor:
    return x * 2 if len(x) < 4 else x


@pytest.mark.parametrize("middle", [minus_the_first, along_all, halves, small_batches])
def test_sequences_that_meet_in_larger_batches_alone_are_warned_of(middle: Callable[[Tensor], Tensor]) -> None:
    told = [row.what for row in plan(Net(middle), SPEC).diagnostics if row.level == "warning"]
    assert any("mixes the sequences of a batch" in what for what in told)


def as_one(x: Tensor) -> Tensor:
    return x + F.gelu(x.reshape(1, -1, 16)).view_as(x)


def time_first(x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    t, b, h = y.shape
    y = y.reshape(t * b, h)
    return (y * torch.sigmoid(y)).view(t, b, h).transpose(0, 1)


def attends(x: Tensor) -> Tensor:
    b, t, _ = x.shape
    q = x.view(b, t, 4, 4).permute(2, 0, 1, 3)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize(
    ("net", "is_captured_once"),
    [
        (lambda: Net(), True),
        (lambda: Net(time_first), True),
        (lambda: Net(attends), True),
        (lambda: Net(as_one), False),
        (lambda: Net(read=lambda ids: ids % ids.shape[0]), False),
    ],
    ids=["plain", "time first", "attends", "as one", "a number of the batch"],
)
def test_sequences_that_never_meet_train_as_in_one_batch(net: Callable[[], Net], is_captured_once: bool) -> None:
    torch.manual_seed(0)
    model = net().double()
    batch = {name: torch.randint(32, (8, 8)) for name in ("ids", "labels")}
    model(**batch).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    captured = capture(model, SPEC)
    made = plan(captured, SPEC)
    assert not [row for row in made.diagnostics if row.level == "warning"]
    assert (len(captured.batch_sizes) == 1) is is_captured_once
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        engine.forward_backward(batch)
        for name, found in engine.gather_gradients().items():
            torch.testing.assert_close(found, gradients[name], rtol=1e-12, atol=1e-14)
