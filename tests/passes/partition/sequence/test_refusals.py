"""What a cut over cp cannot do is one error, which names the op and its line, and what to do."""

from typing import Any

import pytest
import torch

from planner import PlanError, plan
from tests.models import sequences
from tests.models.families import build
from tests.models.plain import plain
from tests.tools.specs import entry_inputs

INPUTS = {"input_ids": {"shape": [16], "dtype": "int64", "high": 50}, "labels": {"like": "input_ids"}}


def error_of(model: torch.nn.Module, cp: int = 2, **more: Any) -> PlanError:
    spec = {"mesh": {"cp": cp}, "batch": {"global": 4, "micro": 2}, "inputs": INPUTS} | more
    with pytest.raises(PlanError) as caught:
        plan(model, spec)
    return caught.value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", sequences.REFUSED)
def test_what_reads_the_sequence_as_a_whole_is_named_with_its_line(op: str) -> None:
    error = error_of(sequences.refused(op))
    assert error.what.startswith(f"cp: {op} reads the whole sequence, [2, ")
    assert "sequences.py:" in str(error.where)
    assert "mesh.cp: 1" in error.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("length", "cp", "nearest", "sizes"),
    [(16, 3, "12 or 18", "{1, 2, 4, 8}"), (10, 2, "8 or 12", "{1, 5}"), (3, 2, "4", "{1}"), (7, 1000, "2000", "{1}")],
)
def test_a_sequence_that_does_not_divide_names_the_nearest(length: int, cp: int, nearest: str, sizes: str) -> None:
    inputs = {name: {"shape": [length], "dtype": "int64", "high": 50} for name in ("input_ids", "labels")}
    error = error_of(plain(50, length), cp, inputs=inputs)
    assert error.what == f"cp = {cp}: a sequence of {length} tokens is not divisible by 2·cp = {2 * cp}"
    assert error.fix == f"use sequences of {nearest} tokens, or choose cp from {sizes}"
    assert "tokens" in str(error.where)


class Shortened(torch.nn.Module):
    """Dropout of all but the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = torch.nn.Embedding(50, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(self.norm(self.tokens(input_ids))[:, :-1])
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels[:, 1:].flatten())


def test_numbers_for_each_element_of_fewer_tokens_are_refused_where_they_are_to_be_those_of_one_process() -> None:
    assert "a sequence of 15 tokens" in error_of(Shortened(), dropout="layout_invariant").what
    plan(Shortened(), {"mesh": {"cp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": INPUTS, "dropout": "fast"})


class OfFeatures(torch.nn.Sequential):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return torch.nn.functional.cross_entropy(super().forward(x), labels)


def test_a_model_without_a_sequence_is_refused() -> None:
    inputs = {"x": {"shape": [16], "dtype": "float32"}, "labels": {"shape": [], "dtype": "int64", "high": 5}}
    model = OfFeatures(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 5))
    error = error_of(model, inputs=inputs)
    assert error.what == "cp = 2: the model has no sequence to shard"
    assert str(error.where) == "mesh.cp"


@pytest.mark.thorough
def test_patches_and_a_class_token_that_do_not_divide_are_named() -> None:
    entry = build("vit")
    inputs = entry_inputs(entry)
    error = error_of(entry.model, inputs=inputs)
    assert error.what == "cp = 2: a sequence of 5 tokens is not divisible by 2·cp = 4"


def test_ep_beside_cp_needs_experts_too() -> None:
    error = error_of(plain(50, 16), mesh={"cp": 2, "ep": 2})
    assert str(error.where) == "mesh.ep"
    assert "the model has no experts" in error.what
