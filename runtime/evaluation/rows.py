"""Rows of tokens become batches, and the scores of a batch become the scores of the tokens of each row.

A window has as many tokens as a sequence if the model shifts its labels itself, and one more, the last target, if it
gets the next tokens as an input.

Sliding windows over a text score each token except the first once, with as much text before it as a window holds:

window 0   | . s s s s s |                      the first window scores all tokens that have one before them
window 1       | . . . . s s |                  moved by the stride, a window scores only its last tokens
window 2         | . . . . . s |                the last window is moved back to end with the text
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from passes.errors import PlanError
from passes.partition.loss.scored import Scored
from planner.spec.spec import Spec
from runtime.data.objectives.next_token import padded
from runtime.data.objectives.samples import pieces_of
from runtime.data.token_batches import length_of, roles_of, stacked
from runtime.data.tokens import Tokens
from runtime.engine.log_probs import Scores
from runtime.engine.prompts import check_fed

PADDING = 0  # any id: padding after a row is not scored, and a causal model does not see it
STRIDE = 32  # as in the Megatron-LM paper


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch: ``ids`` (int64 [tokens]), scored from ``first`` on; only those in ``is_label`` (bool
    [tokens]), if it is set."""

    ids: np.ndarray
    first: int
    is_label: np.ndarray | None = None


class Windows:
    """Windows of ``span`` tokens over ``ids`` [tokens], each ``stride`` further than the one before.

    ``stride``: default: 32, but at most the tokens that a window predicts. ``num_scored``: number of scored tokens.
    Raises PlanError for a text of fewer than two tokens, and for a stride that would skip tokens.
    """

    def __init__(self, ids: np.ndarray, span: int, stride: int | None, source: str) -> None:
        stride = min(STRIDE, span - 1) if stride is None else stride
        if len(ids) < 2:
            what = f"{source} holds {len(ids)} tokens, too few to predict one"
            raise PlanError(what, where="--data", fix="give a longer text")
        if not 1 <= stride < span:
            what = f"a window predicts {span - 1} tokens, so that a stride of {stride} would skip some"
            raise PlanError(what, where="--stride", fix=f"use --stride 1 to {span - 1}")
        self.ids, self.span, self.stride = ids, span, stride
        self.num_scored = len(ids) - 1

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self.ids) - self.span) // self.stride))

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        stop = min(self.span + index * self.stride, len(self.ids))
        start = max(0, stop - self.span)
        scored = 1 if index == 0 else self.span + (index - 1) * self.stride
        return Row(np.asarray(self.ids[start:stop], np.int64), scored - start)


class Samples:
    """One row per sample, of which the labels are scored; one of more than ``span`` tokens is cut as in training.

    Raises PlanError for a stride: samples are not windows.
    """

    def __init__(self, tokens: Tokens, span: int, stride: int | None) -> None:
        if stride is not None:
            what = f"--stride applies to windows over a text, but {tokens.source} has samples with labels"
            raise PlanError(what, where="--stride", fix="remove --stride")
        self._pieces, self.stride = pieces_of(tokens, span, "cut"), 0
        self.num_scored = sum(int(row.is_label[1:].sum()) for row in self if row.is_label is not None)

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Row]:
        return (Row(ids, 1, is_label) for ids, is_label in map(self._pieces.of, range(len(self))))


def windows_of(tokens: Tokens, span: int, stride: int | None) -> Windows | Samples:
    """Return the rows to score for perplexity. Raises PlanError if there are none."""
    if tokens.is_supervised:
        return Samples(tokens, span, stride)
    return Windows(tokens.ids, span, stride, tokens.source)


class RowBatches:
    """Makes batches of rows. ``span``: maximum number of tokens of a row. ``size``: rows per batch.

    Raises PlanError if the objective of the spec is not next-token prediction.
    """

    def __init__(self, spec: Spec, scored: Scored) -> None:
        inputs = spec.require_inputs()
        if spec.data.objective != "next_token":
            what = f"data.objective is {spec.data.objective}: such a model does not predict the next token"
            raise spec.error("data.objective", what, "evaluate a next-token model")
        with spec.locating():
            self.roles = roles_of(inputs, spec.data.inputs)
            self.length = length_of(inputs, self.roles)
            check_fed(self.roles, scored.key, "an evaluation", "evaluate a next-token model")
        self.key, self.ignored = scored.key, {pick.ignored for pick in scored.picks}
        self.offset = int(self.roles[scored.key] == "next_tokens")
        self.span, self.size = self.length + self.offset, spec.batch.global_size
        self._inputs = inputs

    def batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the global batch of ``rows``, padded, with padding sequences if there are too few rows."""
        nothing = np.full(self.length + 1, PADDING)  # unmasked: a fully masked sequence would have no softmax
        samples = []
        for ids in (*(row.ids for row in rows), *[nothing] * (self.size - len(rows))):
            whole = np.append(ids, np.full(self.length + 1 - len(ids), PADDING))
            mask = padded(ids, self.length, PADDING)["attention_mask"]
            samples.append(padded(whole, self.length, PADDING) | {"attention_mask": mask})
        return stacked(samples, self.roles, self._inputs)

    def scores_of(self, rows: Sequence[Row], scores: Scores) -> list[tuple[Tensor, Tensor]]:
        """Return (log P [tokens], is_top [tokens]) of each row's scored tokens, without those that the loss ignores.

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
            what = f"the loss does not score every token of {self.key!r} that has a token before it"
            raise PlanError(what, where=f"inputs.{self.key}", fix="evaluate a model with a loss over every next token")
        if row.is_label is not None:
            is_scored = is_scored & torch.from_numpy(row.is_label[row.first :])
        return scores.log_probabilities[place, columns][is_scored], scores.is_top[place, columns][is_scored]
