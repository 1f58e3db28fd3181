"""The section ``data``: how a text becomes the sequences of a batch. A plan does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from passes.errors import PlanError
from planner.spec.fields import MOST_INPUTS, Flag, Fraction, Name, Positive, Section, Size, Word, key

Role = Literal[
    "tokens",
    "next_tokens",
    "labels",
    "attention_mask",
    "segments",
    "positions",
    "documents",
    "document_mask",
    "cu_seqlens",
    "sentence_order",
]
ROLES: tuple[str, ...] = get_args(Role)
_LONGEST_NGRAM = 64


class MaskSpec(Section):
    share: Fraction = key(0.15, "share of tokens that the model predicts")
    ngram: Annotated[Size, Field(le=_LONGEST_NGRAM)] = key(
        3, "maximum number of consecutive whole words that are masked together"
    )


class DataSpec(Section):
    objective: Literal["next_token", "masked"] = key("next_token", "next_token | masked")
    packing: Flag | Annotated[Literal["documents"], Word] = key(
        True,
        "for next_token: true: sequences run on over the ends of documents; documents: whole documents, each attending "
        "to itself alone; false: one document each, padded",
    )
    overlong: Annotated[Literal["cut", "drop", "refuse"], Word] = key(
        "cut",
        "for packing: documents or false, what happens to documents longer than a sequence: cut | drop | refuse; of "
        "samples with labels, cut takes away context first",
    )
    mean_document: Size | None = key(
        None,
        "for packing: documents, tokens of a token's document on average, for the predicted memory and time; null: all",
    )
    validation: Fraction = key(0.0, "share of the text, at its end, held out for validation")
    mixture: Annotated[dict[Name, Positive], Field(max_length=MOST_INPUTS)] = key(
        {}, "texts with their shares, used without --data: {a.tokens: 0.7, b.tokens: 0.3}"
    )
    inputs: Annotated[dict[Name, Annotated[Role, Word]], Field(max_length=MOST_INPUTS)] = key(
        {}, f"roles of inputs that their names do not imply: {' | '.join(ROLES)}"
    )
    mask: MaskSpec = key(MaskSpec(), "masking, for objective: masked")

    def problems(self) -> Iterator[PlanError]:
        if self.packing == "documents" and self.objective != "next_token":
            what = f"packing: documents is for objective: next_token, and the objective is {self.objective}"
            yield PlanError(what, where="packing", fix="remove packing: a sample of masked words is of one document")
        if self.mean_document is not None and self.packing != "documents":
            fix = "set packing: documents, or remove mean_document"
            yield PlanError("mean_document is for packing: documents", where="mean_document", fix=fix)
