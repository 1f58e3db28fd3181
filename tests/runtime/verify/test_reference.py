"""The one process trains the user's model itself, with what a copy would leave behind, and as it was when built."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import plan
from planner.spec.spec import Spec
from runtime.training.job import Job
from runtime.training.run import train
from runtime.verify.batches import each_document_alone
from runtime.verify.reference import OneProcess, Untouched
from runtime.verify.run import verify
from tests.models.of_mixers import Mixing, convolution
from tests.planner.test_documents import spec

SPEC = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"x": {"shape": [4], "dtype": "float32"}}}


class Closed(nn.Module):
    """Its forward reads ``up`` through a closure, and asks its config as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.config = SimpleNamespace(use_cache=True)
        up = self.up
        self.through = lambda x: torch.tanh(up(x))
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.config.use_cache)
        return self.norm(self.through(x)).square().sum()


def test_what_a_closure_holds_is_trained():
    model = Closed().eval()
    before = model.up.weight.detach().clone()
    one = OneProcess(model, Spec.load(SPEC))
    one.train_step({"x": torch.randn(4, 4)})
    assert one.model is model
    assert model.up.weight.grad is not None
    assert not torch.equal(model.up.weight, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_floats_of_a_batch_are_read_in_the_dtype_of_the_parameters(dtype):
    model = Closed().eval()
    OneProcess(model, Spec.load({**SPEC, "precision": {"parameters": dtype}})).train_step({"x": torch.randn(4, 4)})
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.dtype == getattr(torch, dtype)


class Shifted(nn.Module):
    """Softmax hides a shift of all its logits: its gradient is exactly zero, as that of a key's bias is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x) * 2**-10).sum() + 0 * self.shift


def test_float16_parameters_are_updated_in_float32():
    """In float16 eps is zero, and so is the square of a small gradient: AdamW would make NaN and Inf of them."""
    spec = Spec.load({**SPEC, "precision": {"parameters": "float16"}})
    half, full = Shifted().half(), Shifted()
    full.load_state_dict(half.state_dict())
    ones = OneProcess(half, spec), OneProcess(full, Spec.load(SPEC))
    for _ in range(3):
        x = torch.randint(-2, 3, (4, 4)).float()
        for one in ones:
            one.train_step({"x": x})
    for found, truth in zip(half.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(found, truth.half())


def test_it_runs_without_a_key_cache_and_the_config_is_as_it_was():
    model = Closed().eval()
    OneProcess(model, Spec.load(SPEC)).train_step({"x": torch.randn(4, 4)})
    assert model.seen == [False]
    assert model.config.use_cache is True


@pytest.mark.parametrize("change", ["parameter", "buffer"])
def test_a_model_that_was_changed_before_is_an_error(change):
    model = Closed()
    untouched = Untouched(model)
    untouched.check(model)
    with torch.no_grad():
        (model.up.bias if change == "parameter" else model.norm.running_mean)[0] += 1e-3  # pyright: ignore[reportOptionalSubscript]
    with pytest.raises(PlanError, match="has changed the model: " + ("up.bias" if change == "parameter" else "norm.r")):
        untouched.check(model)


def test_planning_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    untouched = Untouched(model)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum()

    plan(Summed(), SPEC)
    untouched.check(model)


ON_META = """
from torch import nn
from planner import meta_parameters

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(256, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        x = x + self.down(self.up(x).tanh())
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())

def build():
    with meta_parameters():
        return Model()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["model", "normal"])
def test_a_model_on_meta_is_compared_from_the_values_that_its_engine_draws(tmp_path: Path, method: str) -> None:
    ids = "{shape: [6], dtype: int64, high: 256}"
    (tmp_path / "on_meta.py").write_text(ON_META)
    (tmp_path / "text.txt").write_text("To train a model, a text is needed. " * 4)
    (tmp_path / "spec.yaml").write_text(
        f"{{mesh: {{}}, batch: {{global: 4, micro: 2}}, inputs: {{input_ids: {ids}, labels: {{like: input_ids}}}}, "
        f"initialization: {{method: {method}}}}}"
    )
    asked, spec = f"{tmp_path / 'on_meta.py'}:build", str(tmp_path / "spec.yaml")
    assert verify(asked, spec).passed
    rows = train(Job(asked, spec, str(tmp_path / "text.txt"), 2, compare=True, quiet=True)).rows
    assert [row.loss for row in rows] == pytest.approx([row.one_process_loss for row in rows])


PLACES = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
TOKENS = torch.arange(3, 15).view(2, 6)
BATCH = {"tokens": TOKENS, "targets": TOKENS + 1, "position_ids": PLACES}


def test_each_document_has_a_row_and_the_loss_skips_what_is_behind_it():
    found = each_document_alone(BATCH, Spec.load(spec(6)), {"targets": -100})
    assert found["targets"].tolist() == [
        [4, 5, 6, -100, -100, -100],
        [7, 8, -100, -100, -100, -100],
        [9, -100, -100, -100, -100, -100],
        [10, 11, 12, 13, 14, 15],
    ]
    assert torch.where(found["targets"] > 0, found["tokens"] + 1, -100).equal(found["targets"])


def test_the_loss_is_the_mean_over_documents_that_are_computed_one_by_one():
    model = Mixing(convolution).double()
    one = OneProcess(model, Spec.load(spec(6)), ignored={"targets": -100})
    parts = [(0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 6)]
    alone = sum(model(*(x[row : row + 1, a:b] for x in BATCH.values())) * (b - a) for row, a, b in parts) / 12
    assert abs(one.forward_backward(BATCH) - float(alone)) < 1e-12
