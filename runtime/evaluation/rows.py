"""Rows of tokens become batches, and the scores of a batch those of the rows' tokens.

A model that shifts its labels inside sees a window of as many tokens as a sequence has; one that is given the next
tokens sees one more, as its last target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from passes.errors import PlanError
from passes.partition.loss.scored import Scored
from planner.spec.spec import Spec
from runtime.data.roles import length_of, roles_of
from runtime.evaluation.windows import Row
from runtime.scores import Scores

FED = ("tokens", "next_tokens", "labels", "attention_mask", "segments", "positions")
PADDING = 0  # any id: padding after a row is not scored, and a causal model does not see it


class RowBatches:
    """``span``: tokens of a row, at most. ``size``: rows of a batch.

    Raises PlanError if the spec is of another task than the next token.
    """

    def __init__(self, spec: Spec, scored: Scored) -> None:
        inputs = spec.require_inputs()
        if spec.data.objective != "next_token":
            what = f"data.objective is {spec.data.objective}: such a model predicts other tokens than the next one"
            raise spec.error("data.objective", what, "evaluate a next-token model")
        try:
            self.roles = roles_of(inputs, spec.data.inputs)
            self.length = length_of(inputs, self.roles)
        except PlanError as error:
            raise spec.locate(error) from None
        for name, role in self.roles.items():
            if role not in FED or (name == scored.key and role not in FED[:3]):
                what = f"the input {name!r} is fed by {role}, which an evaluation does not have"
                raise spec.error(f"inputs.{name}", what, "evaluate a next-token model")
        self.key, self.ignored = scored.key, {pick.ignored for pick in scored.picks}
        self.offset = int(self.roles[scored.key] == "next_tokens")
        self.span, self.size = self.length + self.offset, spec.batch.global_size
        self._dtypes = {name: getattr(torch, given.dtype) for name, given in inputs.items()}

    def batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The global batch, padded: rows, and padding sequences if there are too few rows."""
        ids = np.full((self.size, self.length + 1), PADDING, np.int64)
        held = np.zeros((self.size, self.length), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row.ids)] = row.ids
            held[place, : len(row.ids)] = 1
        held[len(rows) :] = 1  # a sequence of nothing but padding has no softmax
        values = {
            "tokens": ids[:, :-1],
            "labels": ids[:, :-1],
            "next_tokens": ids[:, 1:],
            "attention_mask": held,
            "segments": np.zeros_like(held),
            "positions": np.broadcast_to(np.arange(self.length), held.shape),
        }
        return {
            name: torch.from_numpy(np.ascontiguousarray(values[role])).to(self._dtypes[name])
            for name, role in self.roles.items()
        }

    def scores_of(self, rows: Sequence[Row], scores: Scores) -> list[tuple[Tensor, Tensor]]:
        """(log P [tokens], is_top [tokens]) of each row's scored tokens, except those that the loss ignores by value.

        Raises PlanError if the loss does not score the expected tokens.
        """
        if not self.offset and scores.is_scored[:, 0].any():
            raise PlanError(
                f"the model predicts the first of {self.key!r} from a window that contains it: it does not shift "
                "its labels",
                where=f"inputs.{self.key}",
                fix=f"set their role with data: {{inputs: {{{self.key}: next_tokens}}}}",
            )
        return [self._of_row(place, row, scores) for place, row in enumerate(rows)]

    def _of_row(self, place: int, row: Row, scores: Scores) -> tuple[Tensor, Tensor]:
        columns = slice(row.first - self.offset, len(row.ids) - self.offset)
        is_scored = scores.is_scored[place, columns]
        skipped = torch.from_numpy(row.ids[row.first :])[~is_scored]
        if not set(skipped.tolist()) <= self.ignored:
            raise PlanError(
                f"the loss does not score every token of {self.key!r} that has one before it",
                where=f"inputs.{self.key}",
                fix="evaluate a model with a loss over every next token",
            )
        if row.is_label is not None:
            is_scored = is_scored & torch.from_numpy(row.is_label[row.first :])
        return scores.log_probabilities[place, columns][is_scored], scores.is_top[place, columns][is_scored]
