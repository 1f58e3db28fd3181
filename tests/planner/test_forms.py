"""Inputs as processors make them: joined samples, a batch dim elsewhere, values that every batch has."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import PlanError, plan
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout
from runtime.data.stream import Stream
from runtime.engine.engine import Engine
from runtime.verify.batches import random_batch
from tests.tools.paths import ROOT

GRID = {"value": [[1, 2, 4]], "joined": True}
INPUTS: dict[str, Any] = {
    "input_ids": {"shape": [6], "dtype": "int64", "high": 50},
    "pixel_values": {"shape": [8, 12], "dtype": "float64", "joined": True},
    "image_grid_thw": GRID,
    "position_ids": {"shape": [3, 6], "dtype": "int64", "high": 64, "batch_dim": 1},
    "labels": {"like": "input_ids"},
}


class Pictures(nn.Module):
    """Patches of all pictures [b · n, 12], the grid of each [b, 3], positions [3, b, s]."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.writes = writes
        self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.patch, self.head = nn.Linear(12, 16), nn.Linear(16, 50)
        self.double()

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, position_ids: Tensor, labels: Tensor
    ) -> Any:
        if self.writes:
            image_grid_thw.clamp_(min=1)
        pictures = torch.split(self.patch(pixel_values), image_grid_thw.prod(-1).tolist())
        means = [x.mean(0) * int(grid[1]) for x, grid in zip(pictures, image_grid_thw, strict=True)]
        hidden = self.embed(input_ids) + torch.stack(means)[:, None] + self.positions(position_ids).sum(0)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def spec_of(inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"mesh": {"tp": 1}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, **more}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(plan(Pictures(), spec_of(INPUTS)))


def drawn(engine: Engine) -> dict[str, Tensor]:
    return random_batch(Spec.load(spec_of(INPUTS)), engine.plan, 0)


def test_a_batch_in_the_forms_of_a_processor_trains_as_in_one_process(engine: Engine):
    batch, model = drawn(engine), Pictures()
    assert {name: list(x.shape) for name, x in batch.items()} == {
        "input_ids": [4, 6],
        "pixel_values": [32, 12],
        "image_grid_thw": [4, 3],
        "position_ids": [3, 4, 6],
        "labels": [4, 6],
    }
    expected = model(**batch)["loss"]
    expected.backward()
    assert engine.forward_backward(batch) == pytest.approx(expected.item(), rel=1e-12)
    assert engine.evaluate({n: x for n, x in batch.items()}) == pytest.approx(expected.item(), rel=1e-12)
    for name, gradient in engine.gather_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("image_grid_thw", lambda x: x + torch.eye(4, 3).long(), r"sequence 0 is \[\[2, 2, 4\]\].*for \[\[1, 2, 4\]\]"),
        ("image_grid_thw", lambda x: x[:3], r"has shape \[3, 3\], the plan expects \[4, 3\]"),
        ("pixel_values", lambda x: x[:-1], r"has shape \[31, 12\], the plan expects \[32, 12\]: 8 rows for each of 4"),
        ("pixel_values", lambda x: x[:16], r"has shape \[16, 12\], the plan expects \[32, 12\]"),
        ("position_ids", lambda x: x.transpose(0, 1), r"has shape \[4, 3, 6\], the plan expects \[3, 4, 6\]"),
    ],
)
def test_a_batch_with_other_pictures_is_one_error(engine: Engine, name: str, change: Any, message: str):
    batch = drawn(engine)
    with pytest.raises(PlanError, match=rf"batch\['{name}'\].*{message}"):
        engine.forward_backward({**batch, name: change(batch[name])})


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("image_grid_thw", {**GRID, "shape": [1, 3]}, "has a value and a shape"),
        ("image_grid_thw", {**GRID, "high": 3}, "has a value and a high"),
        ("image_grid_thw", {"value": [[1], [1, 2]]}, "is no tensor: it has lists that are empty, or of different"),
        ("image_grid_thw", {"value": [[1, 2.5]]}, "has fractions, and dtype int64"),
        ("image_grid_thw", {"value": 3}, "must be a list"),
        ("pixel_values", {"shape": [], "dtype": "float64", "joined": True}, "is joined, and a sample has no dim"),
        ("pixel_values", {"shape": [8], "dtype": "int64", "joined": True, "batch_dim": 1}, "has a batch_dim"),
        ("position_ids", {"shape": [3, 6], "dtype": "int64", "batch_dim": 3}, "has dims 0 to 2"),
        ("input_ids", {"shape": [[4, 6]], "dtype": "int64"}, "no list with a value for each of the lengths"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(name: str, keys: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        Spec.load(spec_of({**INPUTS, name: keys}))


def test_a_value_that_the_model_writes_into_is_refused():
    with pytest.raises(PlanError, match=r"changes inputs\.image_grid_thw in place") as caught:
        plan(Pictures(writes=True), spec_of(INPUTS))
    assert str(caught.value.where) == "inputs.image_grid_thw.value"


@pytest.mark.thorough
def test_each_length_has_its_value():
    lengths = {
        "input_ids": {"shape": [[4, 6]], "dtype": "int64", "high": 50},
        "position_ids": {"shape": [3, [4, 6]], "dtype": "int64", "high": 64, "batch_dim": 1},
        "pixel_values": {"shape": [[2, 8], 12], "dtype": "float64", "joined": True},
        "image_grid_thw": {"value": [[[1, 1, 2]], [[1, 2, 4]]], "joined": True},
    }
    spec = spec_of({**INPUTS, **lengths})
    engine, model = Engine(plan(Pictures(), spec)), Pictures()
    for seed, length in enumerate((6, 4)):
        batch = random_batch(Spec.load(spec), engine.plan, seed)
        assert batch["input_ids"].shape == (4, length)
        assert engine.forward_backward(batch) == pytest.approx(model(**batch)["loss"].item(), rel=1e-12)


def test_the_batches_of_the_example_are_those_of_its_spec():
    spec = Spec.load(str(ROOT / "examples" / "images.yaml"))
    shapes = {name: (i.sizes, getattr(torch, i.dtype)) for name, i in spec.inputs.items()}
    layout = BatchLayout(shapes, 4, 2, 1, 0, forms=spec.forms)
    stream = Stream(f"{ROOT / 'examples' / 'images.py'}:batches", spec, layout, keeps=False)
    assert list(stream.batch(0)["pixel_values"].shape) == [64, 96]
