"""The section ``data``: how a text becomes the sequences of a batch. A plan does not depend on it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from planner.spec.fields import MOST_INPUTS, Flag, Fraction, Name, Positive, Section, Size, Word, key

Role = Literal[
    "tokens",
    "next_tokens",
    "labels",
    "attention_mask",
    "segments",
    "positions",
    "sentence_order",
]
ROLES: tuple[str, ...] = get_args(Role)
_LONGEST_NGRAM = 64


class MaskSpec(Section):
    share: Fraction = key(0.15, "of the tokens, what masked asks for")
    ngram: Annotated[Size, Field(le=_LONGEST_NGRAM)] = key(3, "whole words that are masked together, at most")


class DataSpec(Section):
    objective: Literal["next_token", "masked"] = key("next_token", "next_token | masked")
    packing: Flag = key(
        True, "of next_token: sequences run on over the ends of documents; false: each is of one, padded"
    )
    validation: Fraction = key(0.0, "share of the text, at its end, that is not trained on but validated by")
    mixture: Annotated[dict[Name, Positive], Field(max_length=MOST_INPUTS)] = key(
        {}, "texts with the share of each, where the command line has no --data: {a.tokens: 0.7, b.tokens: 0.3}"
    )
    inputs: Annotated[dict[Name, Annotated[Role, Word]], Field(max_length=MOST_INPUTS)] = key(
        {}, f"what inputs are whose names do not say it: {' | '.join(ROLES)}"
    )
    mask: MaskSpec = key(MaskSpec(), "what masked hides")
