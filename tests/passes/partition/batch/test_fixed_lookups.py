"""A sequence longer than the positions of a model is refused when planning, with the model's line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT
from planner import PlanError
from tests.tools.captures import plan_again


def spec(length: int) -> dict:
    inputs = {"input_ids": {"shape": [length], "dtype": "int64", "high": 32}, "targets": {"like": "input_ids"}}
    return {"mesh": {}, "batch": {"global": 2, "micro": 1}, "inputs": inputs}


@pytest.mark.thorough
def test_a_sequence_as_long_as_the_positions_is_planned_and_one_longer_is_refused() -> None:
    model = GPT(vocabulary=32, length=8, width=16, num_layers=1, num_heads=2)
    assert plan_again(model, spec(8)).stages
    with pytest.raises(PlanError, match="the embedding positions has 8 rows, but the model looks up row 8") as error:
        plan_again(model, spec(9))
    assert "gpt.py" in str(error.value.where)
    assert "self.positions(positions)" in str(error.value.where)


class Shifted(nn.Module):
    """Positions from 2 on, as in RoBERTa; and of the batch where it gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(32, 8), nn.Embedding(10, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(2, 2 + input_ids.shape[1]) if position_ids is None else position_ids
        logits = self.head(self.tokens(input_ids) + self.positions(places))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_positions_are_computed_as_the_model_does() -> None:
    assert plan_again(Shifted(), spec(8)).stages
    with pytest.raises(PlanError, match="has 10 rows, but the model looks up row 10"):
        plan_again(Shifted(), spec(9))


def test_positions_of_the_batch_are_left_to_the_check_of_the_batch() -> None:
    given = spec(9)
    given["inputs"]["position_ids"] = {"like": "input_ids"}
    assert plan_again(Shifted(), given).stages
