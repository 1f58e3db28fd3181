"""Prompts become tokens, and tokens batches of a plan, padded on the right, which a causal model does not see.

tokens        5 8 2 · · ·        · padding
labels        0 0 0 0 0 0        any label: the loss is not read
wanted              ^            the place of the next token's label: its row of logits is the prediction
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from passes.partition.loss.scored import Scored
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.checkpoint.model_files import write_files
from runtime.data.batches import BatchLayout
from runtime.data.text.encoders import ByteEncoder, Encoder, TokenizerFile
from runtime.data.token_batches import OF_IDS, length_of, roles_of
from runtime.data.token_file import files_in, is_token_file

FED = (*OF_IDS, "attention_mask", "segments", "positions")
MASK = "attention_mask"
Prompts = Mapping[str, Tensor] | Tensor | Sequence[Any]
MOST = 64  # new tokens without a number


@dataclass(frozen=True)
class Feed:
    """The batches of sequences of tokens. ``roles``: of the plan's inputs; ``scored``: the labels of its loss.

    Raises PlanError for inputs that a sequence of tokens cannot feed.
    """

    roles: Mapping[str, str]
    scored: Scored

    def __post_init__(self) -> None:
        check_fed(self.roles, self.scored.key, "generation", "generate with a model of tokens and labels")
        _ = self.name

    @property
    def name(self) -> str:
        """The input that takes the tokens."""
        names = [name for name, role in self.roles.items() if role == "tokens"]
        if len(names) != 1:
            what = f"generation feeds one input of tokens, and the model has {' and '.join(map(repr, names)) or 'none'}"
            raise PlanError(what, where="inputs", fix="set its role with data: {inputs: {NAME: tokens}}")
        return names[0]

    @property
    def shift(self) -> int:
        """Position of a token minus that of the label which predicts it."""
        return int(self.roles[self.scored.key] == "next_tokens")

    def length(self, layout: BatchLayout) -> int:
        """Return the number of tokens of one sequence. Raises PlanError for an input of another shape."""
        lengths = {name: shape for name, (shape, _) in layout.inputs.items()}
        length = lengths[self.name][0] if len(lengths[self.name]) == 1 else 0
        for name, shape in lengths.items():
            if shape != (length,):
                what = f"the input {name!r} has the shape {list(shape)}, and a sequence of tokens [length]"
                raise PlanError(what, where=f"inputs.{name}.shape", fix="generate with a model of one text")
        return length

    def paddings(self) -> tuple[int, int]:
        """Return two ids for padding that the loss does not ignore, so that labels count at every place."""
        ignored = {pick.ignored for pick in self.scored.picks}
        ids = [i for i in range(min(self.scored.num_classes, 4)) if i not in ignored]
        return ids[0], ids[-1]

    def batch(self, layout: BatchLayout, sequences: Sequence[Sequence[int]], padding: int) -> dict[str, Tensor]:
        """Return the global batch of as many sequences as the plan has."""
        length = self.length(layout)
        ids = torch.full((len(sequences), length), padding)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        label = torch.full_like(ids, self.paddings()[0])
        values = {"tokens": ids, "labels": label, "next_tokens": label, MASK: torch.ones_like(ids)}
        values["segments"] = torch.zeros_like(ids)
        values["positions"] = torch.arange(length).expand_as(ids).contiguous()
        return {name: values[role].to(layout.inputs[name][1]) for name, role in self.roles.items()}

    def wanted(self, layout: BatchLayout, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the place of each sequence's next label in its microbatch: [microbatches, micro]."""
        at = torch.tensor([len(sequence) - self.shift for sequence in sequences])
        at = at.view(-1, layout.micro)
        return at + torch.arange(layout.micro) * self.length(layout)


def check_fed(roles: Mapping[str, str], key: str, what: str, fix: str) -> None:
    """Raise PlanError for an input that tokens alone cannot feed. ``key``: of the labels; ``what``: the call."""
    for name, role in roles.items():
        if role not in FED or (name == key and role not in OF_IDS):
            lack = f"the input {name!r} is fed by {role}, which {what} does not have"
            raise PlanError(lack, where=f"inputs.{name}", fix=fix)


def sequences_of(prompts: Prompts, name: str, ranges: Sequence[IdRange]) -> list[list[int]]:
    """Return the ids of each prompt: of rows [n, length] without those that an ``attention_mask`` hides, or of a list.

    Raises PlanError, naming the prompt, for one that cannot run.
    """
    rows = _rows(prompts, name)
    if not rows:
        raise PlanError("there are no prompts", where="prompts", fix="give at least one")
    for number, row in enumerate(rows):
        if not row:
            what = f"prompt {number} is empty: there is nothing to continue"
            raise PlanError(what, where="prompts", fix="begin it with a token, such as the one that begins documents")
        for ids in ranges:
            bad = next((i for i in row if not ids.low <= i < ids.high), None)
            if bad is not None:
                what = f"prompt {number} holds the token {bad}; {ids.what} has {ids.unit} 0 to {ids.high - 1}"
                raise PlanError(what, where="prompts", fix="use the tokenizer of the model")
    return rows


def check_lengths(sequences: Sequence[Sequence[int]], max_new_tokens: int, most: int) -> None:
    """Raise PlanError, naming the prompt, unless each fits a planned sequence of ``most`` tokens with its new ones."""
    if max_new_tokens < 1:
        what = f"max_new_tokens is {max_new_tokens}"
        raise PlanError(what, where="max_new_tokens", fix="ask for one token or more")
    for number, ids in enumerate(sequences):
        if len(ids) >= most:
            what = f"prompt {number} has {len(ids)} tokens, and a planned sequence has {most}"
            raise PlanError(what, where=f"prompts[{number}]", fix="shorten the prompt, or plan a longer sequence")
        if len(ids) + max_new_tokens > most:
            raise PlanError(
                f"prompt {number} has {len(ids)} tokens, and with {max_new_tokens} new ones more than the {most} of a "
                "planned sequence",
                where="max_new_tokens",
                fix=f"ask for {most - len(ids)} or fewer, shorten the prompt, or plan a longer sequence",
            )


def _rows(prompts: Prompts, name: str) -> list[list[int]]:
    if isinstance(prompts, Mapping):
        unknown = sorted(prompts.keys() - {name, MASK})
        if unknown or name not in prompts:
            fault = f"has {', '.join(map(repr, unknown))}" if unknown else f"lacks {name!r}"
            raise PlanError(f"the batch of prompts {fault}", where="prompts", fix=f"give {name!r}, and {MASK!r} or not")
        ids, mask = _matrix(prompts[name]), prompts.get(MASK)
        if mask is not None and mask.shape != ids.shape:
            what = f"{MASK} is {list(mask.shape)}, the prompts are {list(ids.shape)}"
            raise PlanError(what, where="prompts", fix="give both the same shape")
        kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        return [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
    if isinstance(prompts, Tensor):
        return _matrix(prompts).tolist()
    return [_row(row) for row in prompts]


def _matrix(ids: Tensor) -> Tensor:
    if ids.ndim != 2 or ids.is_floating_point():
        what = f"the prompts are {ids.dtype} {list(ids.shape)}, not integers [number, length]"
        raise PlanError(what, where="prompts", fix="give ids of tokens, or a list of prompts")
    return ids.cpu()


def _row(row: Any) -> list[int]:
    ids = torch.as_tensor(row)
    if ids.ndim != 1 or (ids.numel() and ids.is_floating_point()):
        what = f"a prompt is {ids.dtype} {list(ids.shape)}, not integers [length]"
        raise PlanError(what, where="prompts", fix="give each prompt as one list of token ids")
    return ids.tolist()


def codec_of(tokenizer: str | None) -> Encoder:
    """Return the encoder of a tokenizer's file or directory, or of a token file of samples; None: of bytes.

    Raises PlanError for another file.
    """
    if tokenizer is None:
        return ByteEncoder()
    with tokenizer_in(tokenizer) as place:
        return TokenizerFile(place)


@contextmanager
def tokenizer_in(source: str) -> Iterator[str]:
    """Yield the place of a tokenizer: ``source``, or a directory with its files, if it is a token file of samples."""
    files = files_in(Path(source)) if is_token_file(Path(source)) else {}
    if not files:
        yield source
        return
    with TemporaryDirectory() as directory:
        write_files(files, Path(directory))
        yield directory


def tokens_of(
    texts: Sequence[str], codec: Encoder, spec: Spec, decided: Plan, max_new_tokens: int | None = None
) -> tuple[list[list[int]], int]:
    """Return the tokens of each text, and the number of new ones; None: as many as fit, up to 64.

    Raises PlanError if they do not fit the plan.
    """
    decisions = decided.to_run()[0]
    sequences, count, roles = fitted(texts, codec, spec, max_new_tokens)
    with spec.locating():
        feed = Feed(roles, decisions.scored)
    return sequences_of(sequences, feed.name, decisions.id_ranges.get(feed.name, ())), count


def fitted(
    texts: Sequence[str], codec: Encoder, spec: Spec, max_new_tokens: int | None = None
) -> tuple[list[list[int]], int, dict[str, str]]:
    """Return tokens and number as ``tokens_of``, and the roles. Raises PlanError if no plan of ``spec`` fits."""
    inputs = spec.longest.require_inputs()
    with spec.locating():
        roles = roles_of(inputs, spec.data.inputs)
        most = length_of(inputs, roles)
    sequences = sequences_of([codec.ids(t) for t in texts], "prompts", ())
    count = max(1, min(MOST, most - max(map(len, sequences)))) if max_new_tokens is None else max_new_tokens
    check_lengths(sequences, count, most)
    return sequences, count, roles
