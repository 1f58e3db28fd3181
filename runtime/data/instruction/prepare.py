"""Rows of conversations become a token file: samples with labels, and the files of their tokenizer."""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from passes.errors import PlanError
from planner.files.text import MIB, is_file, read_bytes, shorten
from runtime.data.instruction.chat_tokenizer import ChatTokenizer
from runtime.data.instruction.conversation import Conversation, conversation_of
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.supervised import MOST_AHEAD, Rule, Sample, Turns, encode_ahead, pair_of, render_ahead
from runtime.data.text.documents import Row, RowError, rows_of, text_of
from runtime.data.text.encoders import GENERATION_CONFIG
from runtime.data.token_file import Header
from runtime.data.token_writer import TokenWriter
from runtime.data.tokens import LABEL, PAIRS, ROW, Tokenization, id_dtype

TEMPLATE = "chat_template.jinja"
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
FILES += (TEMPLATE, GENERATION_CONFIG)
_ROW = 256  # characters added to the size of each row, for its overhead
UNLABELLED, BAD = "rows without an answer to train on, left out", "rows that cannot be used, left out"


def prepare_samples(
    paths: Iterable[Path],
    output: Path,
    tokenizer: str,
    options: Instruction,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Header, list[str]]:
    """Write the samples of all rows to ``output``; return its header and the lines to print.

    Raises PlanError for a row that cannot be used, unless ``options.bad_rows`` is drop, and then leaves no output file.
    """
    samples = _Samples(tokenizer, options)
    files, chat = _files_of(samples.chat, options), samples.chat
    ids = {"end": chat.eos, "begin": chat.tokenizer.bos_token_id, "padding": chat.tokenizer.pad_token_id}
    special = {use: i for use, i in ids.items() if i is not None}
    tokenization = Tokenization(chat.path.name, chat.vocabulary_size, special)
    with TokenWriter(output, tokenization, files, on_bytes) as writer, ExitStack() as stack:
        gc.freeze()  # collecting garbage among all imported objects takes as long as tokenizing short rows
        stack.callback(gc.unfreeze)
        for rows in _by_size(map(samples.begin, rows_of(paths, options.split, writer.note_read))):
            writer.add_documents(*_joined(samples.of(rows), id_dtype(tokenization)))
        if not samples.sizes:
            raise samples.first_bad or PlanError("the texts have no row to train on", where="TEXT", fix="give rows")
        files |= _generation_config(files, samples.rule.ends, chat)
        how = {"date": str(chat.day.date()), "train_on": options.train_on}
        how |= {"template_args": json.dumps(options.arguments)} if options.arguments else {}
        how |= {PAIRS: f"{options.chosen}, {options.rejected}"} if options.chosen is not None else {}
        return writer.finish(how), samples.shown() if options.json else [*samples.lines(), *samples.shown()]


class _Begun(NamedTuple):
    """A row, its conversations, and the error if it cannot be used."""

    row: Row
    turns: Sequence[Turns]
    error: RowError | None = None


class _Samples:
    """The samples of rows, made of many rows at a time. Owns the counts for the report.

    ``several``: number of rows with several samples, all tokens of these rows, and the tokens of the longest sample of
    each. ``first_bad``: error of the first row left out. ``sizes``: tokens of each sample.
    """

    def __init__(self, tokenizer: str, options: Instruction) -> None:
        self.options = options
        self.chat = ChatTokenizer(tokenizer, options.chat_template, options.arguments, options.date)
        self.rule = Rule(self.chat, options.border == "common", frozenset(options.ignore_field or ()))
        self.num_rows, self.several, self.sizes = 0, (0, 0, 0), list[int]()
        self.first_bad: PlanError | None = None
        self._shown: list[tuple[int, Sample]] = []

    def begin(self, row: Row) -> _Begun:
        """Read the conversations of a row, without template and tokenizer."""
        self.num_rows += 1
        try:
            with row as fields:
                return _Begun(row, self._of(fields))
        except RowError as error:
            return _Begun(row, (), error)

    def of(self, rows: Sequence[_Begun]) -> list[list[Sample]]:
        """Return the samples of each row. Raises PlanError with the place of the first row that cannot be used."""
        render_ahead((turns for begun in rows for turns in begun.turns), self.chat)
        written = [self._written(begun) for begun in rows]
        encode_ahead(chain.from_iterable(written), self.chat)
        return [self._samples(begun.row, turns) for begun, turns in zip(rows, written, strict=True)]

    def _written(self, begun: _Begun) -> Sequence[Turns]:
        """Return the rendered turns of a row. Raises RowError if it cannot be used and ``bad_rows`` is refuse."""
        try:
            if begun.error is not None:
                raise begun.error
            with begun.row:
                for turns in begun.turns:
                    turns.write()
                is_pair = self.options.chosen is not None and not self.rule.common and begun.turns
                if is_pair and begun.turns[0].context() != begun.turns[1].context():
                    what = f"{self.options.chosen} and {self.options.rejected} answer different prompts"
                    raise RowError(what, fix="give two answers to one prompt")
            return begun.turns
        except RowError as error:
            if self.options.bad_rows == "refuse":
                raise
            self.first_bad = self.first_bad or error
            self.rule.counts[BAD] += 1
            return []

    def _samples(self, row: Row, parts: Sequence[Turns]) -> list[Sample]:
        samples = [sample for turns in parts for sample in turns.samples()]
        sizes = [len(sample.ids) for sample in samples]
        self.sizes += sizes
        if len(sizes) > 1 and self.options.chosen is None:
            rows, tokens, longest = self.several
            self.several = rows + 1, tokens + sum(sizes), longest + max(sizes)
        if len(self._shown) < self.options.show:
            self._shown += [(row.number, sample) for sample in samples][: self.options.show - len(self._shown)]
        return samples

    def _of(self, row: dict[str, object]) -> list[Turns]:
        options = self.options
        if options.chosen is not None and options.rejected is not None:
            return self._pair(row, options.chosen, options.rejected)
        if options.prompt is None or options.answer is None:
            talk = conversation_of(row, options.chat, options.format, options.train_on)
            how = "given" if options.format else "detected"
            self.rule.counts[f"rows of the format {talk.format} ({how})"] += 1
            return self._of_talk(talk)
        return self._of_texts(text_of(row, options.prompt), text_of(row, options.answer))

    def _pair(self, row: dict[str, object], *names: str) -> list[Turns]:
        """Return the last answer of each field; nothing if either has no answer."""
        prompt, pair = self.options.prompt, list[Turns]()
        for name in names:
            own, before = row.get(name), row.get(prompt or "")
            if isinstance(own, str):
                if prompt is None:
                    what = f"{name} is a text: the place at which its answer begins is not known"
                    raise RowError(what, fix="add --prompt with the field of the prompt, or give messages")
                pair += self._of_texts(text_of(row, prompt), own)
                continue
            first = [{"role": "user", "content": before}] if isinstance(before, str) else before or []
            whole = [*first, *own] if isinstance(first, list) and isinstance(own, list) else own
            pair += self._of_talk(conversation_of({**row, name: whole}, name, self.options.format, "last"))
        return pair if len(pair) == 2 else []

    def _of_texts(self, prompt: str, answer: str) -> list[Turns]:
        if self.options.chat_template is not None:
            talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self._of_talk(Conversation(talk, [1]))
        if (end := self.chat.eos) is None:
            raise PlanError("the tokenizer has no end token", where="--tokenizer", fix="set its eos_token")
        return [pair_of(prompt, answer, end, self.rule)]

    def _of_talk(self, talk: Conversation) -> list[Turns]:
        if talk.trained:
            return [Turns(talk, self.rule)]
        if self.options.unlabelled == "refuse":
            fix = "take the row out, or add --unlabelled drop"
            raise RowError("the row has no message of the assistant to train on", fix=fix)
        self.rule.counts[UNLABELLED] += 1
        return []

    def lines(self) -> Iterator[str]:
        """Yield the report on the samples, one fact per line."""
        yield f"{self.num_rows:,} rows; templates see the date {self.chat.day.date()}"
        rows, several, longest = self.several
        if rows:
            yield (
                f"{rows:,} rows are one sample a turn, since the template changes earlier answers: "
                f"{several / longest:.2f} times the tokens of their longest samples"
            )
        yield from (f"{count:,} {what}" for what, count in sorted(self.rule.counts.items()) if count)
        for end in sorted(self.rule.ends):
            if end not in _listed(self.chat):
                name = self.chat.tokenizer.convert_ids_to_tokens(end)
                yield f"the end token {name} ({end}) is not in {GENERATION_CONFIG}: it is added in the token file"
        if self.first_bad:
            yield f"the first: {shorten(self.first_bad, 400)}"

    def shown(self) -> list[str]:
        """Return the first samples as lines: text with all special tokens, supervised parts, row and turn from 0."""
        lines = []
        for row, sample in self._shown:
            places = [0, *(place for answer in sample.answers for place in answer), len(sample.ids)]
            heads = [self.chat.text(sample.ids[:place]) for place in places]
            parts = [whole[len(head) :] for head, whole in pairwise(heads)]
            if self.options.json:
                each = {"text": "".join(parts), "supervised": parts[1::2], "row": row, "turn": sample.turn}
                lines.append(json.dumps(each, ensure_ascii=False))
            else:
                marked = [f"⟦{part}⟧" if number % 2 else part for number, part in enumerate(parts)]
                lines.append(f"row {row}, turn {sample.turn}: {''.join(marked)}")
        return lines


def _by_size(begun: Iterable[_Begun]) -> Iterator[list[_Begun]]:
    """Yield rows in batches: limits, calls and arrays for one short row take longer than tokenizing it."""
    rows, size = list[_Begun](), 0
    try:
        for row in begun:
            rows.append(row)
            size += _ROW + sum(turns.size for turns in row.turns)
            if size >= MOST_AHEAD:
                yield rows
                rows, size = [], 0
    except PlanError:  # a file cannot be read: errors of earlier rows come first
        yield rows
        raise
    yield rows


def _joined(rows: Sequence[Sequence[Sample]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and marks of all tokens, [tokens], and sizes and numbers of labels, int64 [samples]."""
    samples = [sample for row in rows for sample in row]
    sizes = np.array([len(sample.ids) for sample in samples], np.int64)
    begins = (np.cumsum(sizes) - sizes).tolist()
    ids = np.fromiter(chain.from_iterable(sample.ids for sample in samples), dtype, int(sizes.sum()))
    marks = np.zeros(len(ids), np.uint8)
    for begin, sample in zip(begins, samples, strict=True):
        for start, stop in sample.answers:
            marks[begin + start : begin + stop] = LABEL
    labels = np.concatenate([[0], np.cumsum(marks == LABEL)])
    at = np.array([*begins, len(ids)], np.int64)
    firsts = np.cumsum([0, *(len(row) for row in rows)])
    marks[at[[first for first, row in zip(firsts, rows, strict=False) if row]]] |= ROW
    return ids, marks, sizes, np.diff(labels[at])


def _files_of(chat: ChatTokenizer, options: Instruction) -> dict[str, bytes]:
    """Return the tokenizer's files by name, with the template of the options in place of its own."""
    more = sorted((chat.path / "additional_chat_templates").glob("*.jinja"))
    paths = {name: chat.path / name for name in (*FILES, *(str(path.relative_to(chat.path)) for path in more))}
    if options.chat_template is not None and is_file(Path(options.chat_template)):
        paths[TEMPLATE] = Path(options.chat_template)
    return {name: read_bytes(path, name, most_bytes=256 * MIB) for name, path in paths.items() if is_file(path)}


def _listed(chat: ChatTokenizer) -> tuple[int, ...]:
    """Return the end tokens at which generation stops."""
    return chat.config_ends or chat.ends


def _generation_config(files: Mapping[str, bytes], ends: Iterable[int], chat: ChatTokenizer) -> dict[str, bytes]:
    """Return the generation config with the end tokens of all answers added; nothing if it has them all."""
    missing = [end for end in ends if end not in _listed(chat)]
    if not missing:
        return {}
    config = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    config["eos_token_id"] = [*_listed(chat), *missing]
    return {GENERATION_CONFIG: json.dumps(config, indent=2).encode()}
