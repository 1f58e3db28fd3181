"""Rows of conversations become one token file of samples with labels, with the files of their tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from passes.errors import PlanError
from planner.files.text import MIB, is_file, read_bytes, shorten
from runtime.data.instruction.chat_tokenizer import ChatTokenizer, Templating
from runtime.data.instruction.conversation import Conversation, RowError, conversation_of, pair, text_of
from runtime.data.instruction.rows import Row, rows_of
from runtime.data.instruction.supervised import Rule, Sample, Told, pair_of, samples_of
from runtime.data.text.pieces import Piece, id_dtype
from runtime.data.text.tokenizer_file import GENERATION_CONFIG
from runtime.data.token_file import Header
from runtime.data.token_writer import TokenWriter
from runtime.data.tokens import LABEL, ROW, Tokenization

TEMPLATE = "chat_template.jinja"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    TEMPLATE,
    GENERATION_CONFIG,
)
UNLABELLED, BAD = "rows without an answer to train on, left out", "rows that cannot be used, left out"


@dataclass(frozen=True, slots=True)
class Asked:
    """The options. ``chat``: the field of messages; or ``prompt`` and ``answer``, those of texts."""

    tokenizer: str
    chat: str | None = None
    prompt: str | None = None
    answer: str | None = None
    format: str | None = None
    templating: Templating = field(default_factory=Templating)
    train_on: str = "all"
    common: bool = False
    ignored: tuple[str, ...] = ()
    drop_unlabelled: bool = False
    skip_bad: bool = False
    split: str | None = None


@dataclass(slots=True)
class Report:
    """``several``: rows of several samples, their tokens, and those of the longest of each.
    ``first_bad``: of the rows left out. ``sizes``: of the samples."""

    told: Told = field(default_factory=Told)
    formats: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    several: tuple[int, int, int] = (0, 0, 0)
    first_bad: PlanError | None = None
    sizes: list[int] = field(default_factory=list)
    shown: list[tuple[int, Sample]] = field(default_factory=list)


def prepare_samples(
    paths: Iterable[Path],
    output: Path,
    asked: Asked,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    num_shown: int = 0,
) -> tuple[Header, Report, ChatTokenizer]:
    """Write the samples of all rows to ``output``. ``num_shown``: of the first samples, kept in the report.

    Raises PlanError for a row that cannot be used, unless such rows are to be left out; no output stays then.
    """
    making = _Making(asked)
    chat, report, num_bytes = making.rule.chat, making.report, 0

    def read(count: int) -> None:
        nonlocal num_bytes
        num_bytes += count
        on_bytes(count)

    files = _files_of(chat, asked.templating)
    with TokenWriter(output, _tokenization(chat), files) as writer:
        for row in rows_of(paths, asked.split, read):
            samples = making.samples(row)
            report.shown += [(row.number, sample) for sample in samples][: num_shown - len(report.shown)]
            writer.add(_pieces(samples, id_dtype(writer.tokenization)))
        if not report.sizes:
            raise report.first_bad or PlanError("the texts have no row to train on", where="TEXT", fix="give rows")
        files |= _generation_config(files, report.told.ends, chat)
        made = {"date": str(asked.templating.today), "train_on": asked.train_on}
        made |= {"template_args": json.dumps(args)} if (args := dict(asked.templating.arguments or {})) else {}
        return writer.finish(num_bytes, made), report, chat


class _Making:
    """Samples of rows, one after another. Owns the report."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.report = asked, Report()
        self.rule = Rule(ChatTokenizer(asked.tokenizer, asked.templating), asked.common, frozenset(asked.ignored))

    def samples(self, row: Row) -> list[Sample]:
        """Raises PlanError with the place of the row."""
        self.report.num_rows += 1
        try:
            if isinstance(row.value, PlanError):
                raise row.value
            found = self._of(row)
        except PlanError as error:
            if not self.asked.skip_bad or (not isinstance(error, RowError) and error is not row.value):
                raise error if error.where else PlanError(error.what, where=row.where, fix=error.fix) from None
            self.report.first_bad = self.report.first_bad or PlanError(error.what, where=row.where, fix=error.fix)
            self.report.told.counts[BAD] += 1
            return []
        self._count(found)
        return found

    def _of(self, row: Row) -> list[Sample]:
        assert isinstance(row.value, dict)
        asked, told = self.asked, self.report.told
        if asked.prompt is None or asked.answer is None:
            talk = conversation_of(row.value, asked.chat, asked.format, asked.train_on)
            self.report.formats[talk.format] += 1
            return self._of_talk(talk)
        prompt, answer = text_of(row.value, asked.prompt), text_of(row.value, asked.answer)
        if asked.templating.template is not None:
            return self._of_talk(pair(prompt, answer))
        if (end := self.rule.chat.eos) is None:
            raise PlanError("the tokenizer has no end token", where="--tokenizer", fix="set its eos_token")
        return [pair_of(prompt, answer, end, self.rule, told)]

    def _of_talk(self, talk: Conversation) -> list[Sample]:
        if talk.trained:
            return samples_of(talk, self.rule, self.report.told)
        if not self.asked.drop_unlabelled:
            fix = "take the row out, or add --unlabelled drop"
            raise RowError("the row has no message of the assistant to train on", fix=fix)
        self.report.told.counts[UNLABELLED] += 1
        return []

    def _count(self, samples: Sequence[Sample]) -> None:
        sizes = [len(sample.ids) for sample in samples]
        self.report.sizes += sizes
        if len(sizes) > 1:
            rows, tokens, longest = self.report.several
            self.report.several = rows + 1, tokens + sum(sizes), longest + max(sizes)


def _pieces(samples: Sequence[Sample], dtype: np.dtype) -> Iterator[Piece]:
    for number, sample in enumerate(samples):
        marks = np.zeros(len(sample.ids), np.uint8)
        for start, stop in sample.answers:
            marks[start:stop] = LABEL
        marks[0] |= 0 if number else ROW
        yield Piece(np.array(sample.ids, dtype), marks, int(np.count_nonzero(marks & LABEL)), has_end=True)


def _tokenization(chat: ChatTokenizer) -> Tokenization:
    ids = {"end": chat.eos, "begin": chat.tokenizer.bos_token_id, "padding": chat.tokenizer.pad_token_id}
    special = {use: i for use, i in ids.items() if i is not None}
    return Tokenization(chat.path.name, chat.vocabulary_size, special)


def _files_of(chat: ChatTokenizer, templating: Templating) -> dict[str, bytes]:
    """Of the directory, and the template that was given in place of its own."""
    more = sorted((chat.path / "additional_chat_templates").glob("*.jinja"))
    names = [*FILES, *(str(path.relative_to(chat.path)) for path in more)]
    found = {
        name: read_bytes(chat.path / name, name, most_bytes=256 * MIB) for name in names if is_file(chat.path / name)
    }
    if templating.template is not None and is_file(Path(templating.template)):
        found[TEMPLATE] = read_bytes(templating.template, "chat template", most_bytes=MIB)
    return found


def _generation_config(files: dict[str, bytes], ends: Iterable[int], chat: ChatTokenizer) -> dict[str, bytes]:
    """With the end tokens of all answers: a model trained on them stops there."""
    listed = chat.config_ends or tuple(chat.ends)
    missing = [end for end in ends if end not in listed]
    if not missing:
        return {}
    found = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    found["eos_token_id"] = [*listed, *missing]
    return {GENERATION_CONFIG: json.dumps(found, indent=2).encode()}


def lines_of(report: Report, asked: Asked, chat: ChatTokenizer) -> list[str]:
    """What there is to say of the samples, a fact a line."""
    lines = [f"{report.num_rows:,} rows; templates see the date {asked.templating.today}"]
    how = "given" if asked.format else "detected"
    lines += [f"format {name} ({how}): {count:,} rows" for name, count in sorted(report.formats.items())]
    rows, several, longest = report.several
    if rows:
        lines.append(
            f"{rows:,} rows are one sample a turn, since the template changes earlier answers: "
            f"{several / longest:.2f} times the tokens of their longest samples"
        )
    lines += [f"{count:,} {what}" for what, count in sorted(report.told.counts.items()) if count]
    for end in sorted(report.told.ends):
        if end not in (chat.config_ends or (chat.eos,)):
            name = chat.tokenizer.convert_ids_to_tokens(end)
            lines.append(f"the end token {name} ({end}) is not in {GENERATION_CONFIG}: it is added in the token file")
    return [*lines, *([f"the first: {shorten(report.first_bad, 400)}"] if report.first_bad else [])]


def shown(report: Report, chat: ChatTokenizer) -> Iterator[dict[str, object]]:
    """The first samples: ``text`` with all special tokens, ``supervised`` parts, ``row`` and ``turn``, from 0."""
    for row, sample in report.shown:
        before = [chat.text(sample.ids[:start]) for start, _ in sample.answers]
        until = [chat.text(sample.ids[:stop]) for _, stop in sample.answers]
        parts = [whole[len(head) :] for head, whole in zip(before, until, strict=True)]
        yield {"text": chat.text(sample.ids), "supervised": parts, "row": row, "turn": sample.turn}
