"""Half precision: losses and counts of more tokens than float16 can count, or bfloat16 tell apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.partition.loss.scaling import HALF
from planner import Plan, plan
from runtime import Engine

SIZE, LENGTH, CLASSES = 64, 1100, 16  # 70,400 tokens; float16 ends at 65,504


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, torch.linspace(0.5, 1.5, CLASSES, dtype=logits.dtype))


def sum_over_count(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != 3).sum()


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != 3).to(logits.dtype)
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(labels, CLASSES).to(logits.dtype)) + 0.1 * logits.square().mean()


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    mean,
    label_smoothing,
    class_weights,
    sum_over_count,
    masked_mean,
    squares,
]


class Classifier(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.loss = nn.Embedding(32, 8), nn.Linear(8, CLASSES), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)).view(-1, CLASSES), labels.view(-1))


def batch(length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "ids": torch.randint(0, 32, (SIZE, length), generator=generator),
        "labels": torch.randint(0, CLASSES, (SIZE, length), generator=generator),
    }


def planned(loss: Callable[[Tensor, Tensor], Tensor], dtype: str, micro: int = 16) -> Plan:
    inputs = {"ids": {"shape": [LENGTH], "dtype": "int64"}, "labels": {"like": "ids"}}
    precision = {"parameters": dtype, "loss_scale": "dynamic" if dtype == "float16" else "none"}
    spec = {"mesh": {}, "batch": {"global": SIZE, "micro": micro}, "inputs": inputs, "precision": precision}
    return plan(Classifier(loss), spec)


def truth(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Loss and gradient norm in float32 of the weights as ``dtype`` holds them."""
    model = Classifier(loss).to(dtype).float()
    value = model(**batch())
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()  # pyright: ignore


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("micro", [16, 64])
def test_seventy_thousand_tokens_have_the_loss_that_float32_gives_them(loss, dtype, micro):
    expected, norm = truth(loss, getattr(torch, dtype))
    with Engine(planned(loss, dtype, micro)) as engine:
        report = engine.train_step(batch())
    allowed = 2e-3 if dtype == "float16" else 1.5e-2  # the roundings of single tokens' losses and gradients
    assert report.loss == pytest.approx(expected, rel=allowed)
    assert report.grad_norm == pytest.approx(norm, rel=allowed)
    assert not report.skipped


def test_bfloat16_counts_every_token():
    """1,000,003 is 999,424 in bfloat16."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * (x * 0.0 + 1.0)).sum() / x.sum()

    length = 1_000_003
    spec = {"mesh": {}, "batch": {"global": 2, "micro": 1}, "inputs": {"x": {"shape": [length], "dtype": "float32"}}}
    with Engine(plan(Counting(), {**spec, "precision": {"parameters": "bfloat16"}})) as engine:
        assert engine.evaluate({"x": torch.ones(2, length)}) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_scalar_of_the_share_is_of_half_precision(loss):
    made = planned(loss, "bfloat16")
    program = made.to_run()[0].program
    scalars = [n for n in program.graph.graph.nodes if n.op == "call_function" and not n.meta["val"].dim()]
    assert scalars
    assert [n.name for n in scalars if n.meta["val"].dtype in HALF] == []


def test_a_model_in_float32_has_the_ops_that_it_had():
    program = planned(mean, "float32").to_run()[0].program
    (loss,) = program.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cross_entropy_loss.default)
    assert loss.args[3] == 2  # the sum, in one op


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dropout_in_half_precision_has_the_mean_of_that_in_float32(dtype):
    """The masks are the same; a factor of bfloat16 would be 0.16 % small, on every element alike."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.drop = nn.Embedding(32, 8), nn.Dropout(0.1)
            nn.init.uniform_(self.embed.weight, 0.5, 1.0)

        def forward(self, ids: Tensor) -> Tensor:
            return self.drop(self.embed(ids)).mean()

    def loss(precision: str) -> float:
        spec = {
            "mesh": {},
            "batch": {"global": SIZE, "micro": 16},
            "inputs": {"ids": {"shape": [LENGTH], "dtype": "int64"}},
            "precision": {"parameters": precision},
        }
        with Engine(plan(Dropping(), spec)) as engine:
            return engine.forward_backward({"ids": batch()["ids"]})

    assert loss(dtype) == pytest.approx(loss("float32"), rel=3e-4)
