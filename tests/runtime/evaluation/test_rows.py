"""Rows become the inputs of a spec by their roles; what a model does not score is told, and what it skips by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from passes.partition.loss.scored import Pick, Scored
from planner import PlanError
from planner.spec.spec import Spec
from runtime.engine.log_probs import Scores
from runtime.evaluation.rows import Row, RowBatches

LENGTH = 4


def batches(*names: str, ignored: int = -100, **data: Any) -> RowBatches:
    inputs = {name: {"shape": [LENGTH], "dtype": "int64"} for name in names}
    spec = Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": inputs, "data": data})
    return RowBatches(spec, Scored(names[1], 9, (Pick("loss", 1, 1, 9, ignored),)))


def scores(is_scored: list[list[int]]) -> Scores:
    held = torch.tensor(is_scored, dtype=torch.bool)
    return Scores("", torch.arange(2.0 * LENGTH).view(2, LENGTH), held, held)


def test_a_short_row_is_padded_and_a_row_that_lacks_is_a_sequence_all_the_same() -> None:
    found = batches("ids", "targets", "attention_mask", "position_ids", inputs={"ids": "tokens"})
    made = found.batch([Row(np.array([5, 6, 7]), 1)])
    assert (found.span, found.size) == (5, 2)
    assert made["ids"].tolist() == [[5, 6, 7, 0], [0] * 4]
    assert made["targets"].tolist() == [[6, 7, 0, 0], [0] * 4]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0], [1] * 4]
    assert made["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


def test_a_score_is_found_where_the_label_of_its_token_is() -> None:
    row = Row(np.array([5, 6, 7]), 1)
    ((shifted, _),) = batches("input_ids", "labels").scores_of([row], scores([[0, 1, 1, 1]] * 2))
    ((given, _),) = batches("input_ids", "targets").scores_of([row], scores([[1, 1, 1, 1]] * 2))
    assert (shifted.tolist(), given.tolist()) == ([1.0, 2.0], [0.0, 1.0])


def test_a_token_that_the_loss_ignores_by_value_is_left_out() -> None:
    found = batches("input_ids", "labels", ignored=6)
    ((log_probabilities, is_top),) = found.scores_of([Row(np.array([5, 6, 7]), 1)], scores([[0, 0, 1, 1]] * 2))
    assert (log_probabilities.tolist(), is_top.tolist()) == ([2.0], [True])


@pytest.mark.parametrize(
    ("is_scored", "what"),
    [([[0, 0, 1, 1]] * 2, "the loss does not score every token"), ([[1] * 4] * 2, "it does not shift its labels")],
)
def test_a_model_that_predicts_other_tokens_is_told(is_scored: list[list[int]], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        batches("input_ids", "labels").scores_of([Row(np.array([5, 6, 7]), 1)], scores(is_scored))
