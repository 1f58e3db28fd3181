"""Rows of conversations become one token file of samples with labels, with the files of their tokenizer."""

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
_ROW = 256  # characters that a row counts for, whatever it holds
UNLABELLED, BAD = "rows without an answer to train on, left out", "rows that cannot be used, left out"


def prepare_samples(
    paths: Iterable[Path],
    output: Path,
    tokenizer: str,
    asked: Instruction,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Header, list[str]]:
    """Write the samples of all rows to ``output``; returns its header and the lines to print.

    Raises PlanError for a row that cannot be used, unless such rows are to be left out; no output stays then.
    """
    made = _Samples(tokenizer, asked)
    files, chat = _files_of(made.chat, asked), made.chat
    ids = {"end": chat.eos, "begin": chat.tokenizer.bos_token_id, "padding": chat.tokenizer.pad_token_id}
    special = {use: i for use, i in ids.items() if i is not None}
    tokenization = Tokenization(chat.path.name, chat.vocabulary_size, special)
    with TokenWriter(output, tokenization, files, on_bytes) as writer, ExitStack() as stack:
        gc.freeze()  # to look for garbage among all imports takes as long as to tokenize short rows
        stack.callback(gc.unfreeze)
        for rows in _by_size(map(made.begin, rows_of(paths, asked.split, writer.note_read))):
            writer.add_documents(*_joined(made.of(rows), id_dtype(tokenization)))
        if not made.sizes:
            raise made.first_bad or PlanError("the texts have no row to train on", where="TEXT", fix="give rows")
        files |= _generation_config(files, made.rule.ends, made.chat)
        how = {"date": str(made.chat.day.date()), "train_on": asked.train_on}
        how |= {"template_args": json.dumps(asked.arguments)} if asked.arguments else {}
        how |= {PAIRS: f"{asked.chosen}, {asked.rejected}"} if asked.chosen is not None else {}
        return writer.finish(how), made.shown() if asked.json else [*made.lines(), *made.shown()]


class _Begun(NamedTuple):
    """A row, its conversations, and why it cannot be used."""

    row: Row
    turns: Sequence[Turns]
    error: RowError | None = None


class _Samples:
    """The samples of rows, of many rows at once. Owns the counts: ``several``: rows of several samples, their tokens,
    and those of the longest of each. ``first_bad``: of the rows left out. ``sizes``: of the samples.
    """

    def __init__(self, tokenizer: str, asked: Instruction) -> None:
        self.asked = asked
        self.chat = ChatTokenizer(tokenizer, asked.chat_template, asked.arguments, asked.date)
        self.rule = Rule(self.chat, asked.border == "common", frozenset(asked.ignore_field or ()))
        self.num_rows, self.several, self.sizes = 0, (0, 0, 0), list[int]()
        self.first_bad: PlanError | None = None
        self._shown: list[tuple[int, Sample]] = []

    def begin(self, row: Row) -> _Begun:
        """What of a row needs neither template nor tokenizer."""
        self.num_rows += 1
        try:
            with row as fields:
                return _Begun(row, self._of(fields))
        except RowError as error:
            return _Begun(row, (), error)

    def of(self, rows: Sequence[_Begun]) -> list[list[Sample]]:
        """Those of each row. Raises PlanError with the place of the first row that cannot be used."""
        render_ahead((turns for begun in rows for turns in begun.turns), self.chat)
        written = [self._written(begun) for begun in rows]
        encode_ahead(chain.from_iterable(written), self.chat)
        return [self._samples(begun.row, turns) for begun, turns in zip(rows, written, strict=True)]

    def _written(self, begun: _Begun) -> Sequence[Turns]:
        """Raises RowError for a row that cannot be used, unless such rows are to be left out."""
        try:
            if begun.error is not None:
                raise begun.error
            with begun.row:
                for turns in begun.turns:
                    turns.write()
                is_pair = self.asked.chosen is not None and not self.rule.common and begun.turns
                if is_pair and begun.turns[0].context() != begun.turns[1].context():
                    what = f"{self.asked.chosen} and {self.asked.rejected} answer different prompts"
                    raise RowError(what, fix="give two answers to one prompt")
            return begun.turns
        except RowError as error:
            if self.asked.bad_rows == "refuse":
                raise
            self.first_bad = self.first_bad or error
            self.rule.counts[BAD] += 1
            return []

    def _samples(self, row: Row, parts: Sequence[Turns]) -> list[Sample]:
        found = [sample for turns in parts for sample in turns.samples()]
        sizes = [len(sample.ids) for sample in found]
        self.sizes += sizes
        if len(sizes) > 1 and self.asked.chosen is None:
            rows, tokens, longest = self.several
            self.several = rows + 1, tokens + sum(sizes), longest + max(sizes)
        if len(self._shown) < self.asked.show:
            self._shown += [(row.number, sample) for sample in found][: self.asked.show - len(self._shown)]
        return found

    def _of(self, row: dict[str, object]) -> list[Turns]:
        asked = self.asked
        if asked.chosen is not None and asked.rejected is not None:
            return self._pair(row, asked.chosen, asked.rejected)
        if asked.prompt is None or asked.answer is None:
            talk = conversation_of(row, asked.chat, asked.format, asked.train_on)
            how = "given" if asked.format else "detected"
            self.rule.counts[f"rows of the format {talk.format} ({how})"] += 1
            return self._of_talk(talk)
        return self._of_texts(text_of(row, asked.prompt), text_of(row, asked.answer))

    def _pair(self, row: dict[str, object], *names: str) -> list[Turns]:
        """The last answer of each field; none if either has no answer."""
        prompt, found = self.asked.prompt, list[Turns]()
        for name in names:
            own, before = row.get(name), row.get(prompt or "")
            if isinstance(own, str):
                if prompt is None:
                    what = f"{name} is a text: the place at which its answer begins is not known"
                    raise RowError(what, fix="add --prompt with the field of the prompt, or give messages")
                found += self._of_texts(text_of(row, prompt), own)
                continue
            first = [{"role": "user", "content": before}] if isinstance(before, str) else before or []
            whole = [*first, *own] if isinstance(first, list) and isinstance(own, list) else own
            found += self._of_talk(conversation_of({**row, name: whole}, name, self.asked.format, "last"))
        return found if len(found) == 2 else []

    def _of_texts(self, prompt: str, answer: str) -> list[Turns]:
        if self.asked.chat_template is not None:
            talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self._of_talk(Conversation(talk, [1]))
        if (end := self.chat.eos) is None:
            raise PlanError("the tokenizer has no end token", where="--tokenizer", fix="set its eos_token")
        return [pair_of(prompt, answer, end, self.rule)]

    def _of_talk(self, talk: Conversation) -> list[Turns]:
        if talk.trained:
            return [Turns(talk, self.rule)]
        if self.asked.unlabelled == "refuse":
            fix = "take the row out, or add --unlabelled drop"
            raise RowError("the row has no message of the assistant to train on", fix=fix)
        self.rule.counts[UNLABELLED] += 1
        return []

    def lines(self) -> Iterator[str]:
        """What there is to say of the samples, a fact a line."""
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
        """The first samples: ``text`` with all special tokens, ``supervised`` parts, ``row`` and ``turn``, from 0."""
        found = []
        for row, sample in self._shown:
            places = [0, *(place for answer in sample.answers for place in answer), len(sample.ids)]
            heads = [self.chat.text(sample.ids[:place]) for place in places]
            parts = [whole[len(head) :] for head, whole in pairwise(heads)]
            if self.asked.json:
                each = {"text": "".join(parts), "supervised": parts[1::2], "row": row, "turn": sample.turn}
                found.append(json.dumps(each, ensure_ascii=False))
            else:
                marked = [f"⟦{part}⟧" if number % 2 else part for number, part in enumerate(parts)]
                found.append(f"row {row}, turn {sample.turn}: {''.join(marked)}")
        return found


def _by_size(begun: Iterable[_Begun]) -> Iterator[list[_Begun]]:
    """Some rows at once: limits, calls and arrays for one short row take longer than to tokenize it."""
    rows, size = list[_Begun](), 0
    try:
        for row in begun:
            rows.append(row)
            size += _ROW + sum(turns.size for turns in row.turns)
            if size >= MOST_AHEAD:
                yield rows
                rows, size = [], 0
    except PlanError:  # of what cannot be read: behind the errors of the rows in front of it
        yield rows
        raise
    yield rows


def _joined(rows: Sequence[Sequence[Sample]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids and marks of all tokens; sizes, and numbers of labels, of the samples."""
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


def _files_of(chat: ChatTokenizer, asked: Instruction) -> dict[str, bytes]:
    """Of the directory, and the template that was given in place of its own."""
    more = sorted((chat.path / "additional_chat_templates").glob("*.jinja"))
    paths = {name: chat.path / name for name in (*FILES, *(str(path.relative_to(chat.path)) for path in more))}
    if asked.chat_template is not None and is_file(Path(asked.chat_template)):
        paths[TEMPLATE] = Path(asked.chat_template)
    return {name: read_bytes(path, name, most_bytes=256 * MIB) for name, path in paths.items() if is_file(path)}


def _listed(chat: ChatTokenizer) -> tuple[int, ...]:
    """The end tokens that generation knows of."""
    return chat.config_ends or chat.ends


def _generation_config(files: Mapping[str, bytes], ends: Iterable[int], chat: ChatTokenizer) -> dict[str, bytes]:
    """With the end tokens of all answers: a model trained on them stops there."""
    missing = [end for end in ends if end not in _listed(chat)]
    if not missing:
        return {}
    found = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    found["eos_token_id"] = [*_listed(chat), *missing]
    return {GENERATION_CONFIG: json.dumps(found, indent=2).encode()}
