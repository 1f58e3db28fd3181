"""Texts to continue: their tokens, checked against a plan before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.checkpoint.model_files import write_files
from runtime.data.roles import length_of, roles_of
from runtime.data.text.byte_tokens import ByteEncoder
from runtime.data.text.tokenizer_file import TokenizerFile
from runtime.data.token_file import files_in, is_token_file
from runtime.next_tokens.prompts import Feed, check_lengths, sequences_of

Codec = ByteEncoder | TokenizerFile
MOST = 64  # new tokens, if no number is given


def codec_of(tokenizer: str | None) -> Codec:
    """Of a tokenizer's file or directory, or of the token file of samples that it made; without one, bytes are the
    tokens. Raises PlanError for another file."""
    if tokenizer is None:
        return ByteEncoder()
    with tokenizer_in(tokenizer) as place:
        return TokenizerFile(place)


@contextmanager
def tokenizer_in(source: str) -> Iterator[str]:
    """The place of a tokenizer: ``source``, or a directory of the files in it, if it is a token file of samples."""
    files = files_in(Path(source)) if is_token_file(Path(source)) else {}
    if not files:
        yield source
        return
    with TemporaryDirectory() as directory:
        write_files(files, Path(directory))
        yield directory


def tokens_of(
    texts: Sequence[str], codec: Codec, spec: Spec, decided: Plan, max_new_tokens: int | None = None
) -> tuple[list[list[int]], int]:
    """The tokens of each text, and how many new ones each gets: without a number as many as fit, up to 64.

    Raises PlanError if they do not fit the plan.
    """
    decisions = decided.to_run()[0]
    found, count, roles = fitted(texts, codec, spec, max_new_tokens)
    try:
        feed = Feed(roles, decisions.scored)
    except PlanError as error:
        raise spec.locate(error) from None
    return sequences_of(found, feed.name, decisions.id_ranges.get(feed.name, ())), count


def fitted(
    texts: Sequence[str], codec: Codec, spec: Spec, max_new_tokens: int | None = None
) -> tuple[list[list[int]], int, dict[str, str]]:
    """As ``tokens_of``, and the role of each input. Raises PlanError if no plan of ``spec`` takes the texts."""
    inputs = spec.longest.require_inputs()
    try:
        roles = roles_of(inputs, spec.data.inputs)
        most = length_of(inputs, roles)
    except PlanError as error:
        raise spec.locate(error) from None
    found = sequences_of([codec.ids(t) for t in texts], "prompts", ())
    count = max(1, min(MOST, most - max(map(len, found)))) if max_new_tokens is None else max_new_tokens
    check_lengths(found, count, most)
    return found, count, roles
