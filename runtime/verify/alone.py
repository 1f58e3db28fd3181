"""Packed documents in rows of their own: the truth for a model that would mix them, if its plan ends ops with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from passes.program.program import PACKED
from planner.frozen_plan import Plan
from planner.spec.inputs import role_of
from planner.spec.spec import Spec


def ignored_apart(decided: Plan) -> Mapping[str, int] | None:
    """By key the label that the loss skips, of a plan that ends convolutions or scans with documents; None if the model
    keeps documents apart itself."""
    is_changed = any(note.what.startswith(PACKED) for note in decided.diagnostics)
    return decided.to_run()[0].ignored_labels if is_changed else None


def each_document_alone(batch: Mapping[str, Tensor], spec: Spec, ignored: Mapping[str, int]) -> dict[str, Tensor]:
    """Each document in a row of its own, with further tokens behind it that the loss skips."""
    begins = _begins(batch, spec)
    (sequences, starts), length = begins.nonzero().unbind(1), begins.shape[1]
    ends = torch.where(sequences[1:] == sequences[:-1], starts[1:], length)
    ends = torch.cat([ends, ends.new_tensor([length])])
    places = starts[:, None] + torch.arange(int((ends - starts).max()))
    of_tokens = sequences[:, None], places.clamp(max=length - 1)
    found = {n: x[of_tokens if x.shape[:2] == begins.shape else sequences] for n, x in batch.items()}
    return found | {
        name: found[name].masked_fill(places >= ends[:, None], skipped) for name, skipped in ignored.items()
    }


def _begins(batch: Mapping[str, Tensor], spec: Spec) -> Tensor:
    begins = next(x for name, x in batch.items() if role_of(name, spec.data.inputs) == "positions") == 0
    begins[:, 0] = True
    return begins


def ignore_first(batch: dict[str, Tensor], spec: Spec, ignored: Mapping[str, int]) -> None:
    """Labels that a model shifts: the first of a document would be that of a token of another."""
    for name, skipped in ignored.items():
        if role_of(name, spec.data.inputs) == "labels":
            batch[name] = batch[name].masked_fill(_begins(batch, spec), skipped)
