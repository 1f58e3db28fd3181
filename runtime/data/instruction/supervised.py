"""The rule for labels of a conversation: the tokens that the model would generate, after the context of generation.

    C        the template on the messages before a turn, with the generation prompt <|user|>hi<|assistant|>
    R        the template on the messages up to the turn                            <|user|>hi<|assistant|>yes<|end|>
    ids      C as generation tokenizes it, then the answer tokenized separately     <|user|>hi<|assistant|> + yes<|end|>
    labels   the answer's tokens, up to and including its end token                                          yes<|end|>

Several turns form one sample only if the ids of each turn are a prefix of the ids of the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import ne
from typing import NamedTuple

from planner.files.text import shorten
from runtime.data.instruction.chat_tokenizer import Border, ChatTokenizer
from runtime.data.instruction.conversation import Conversation, Message, Said
from runtime.data.instruction.presence import FIRST_MARK, Frames, Presence
from runtime.data.instruction.template import Case
from runtime.data.text.documents import RowError

MERGED, OTHER, BEHIND = (
    "rows with a border over which the tokenizer would merge characters: no token crosses it",
    "rows with other tokens than generation sees, of --border common",
    "messages behind the last of the assistant, left out",
)
MOST_AHEAD, _MOST = 1 << 18, 1 << 31  # most characters of contexts: of rows rendered together, of one row
_TEXT = 64  # characters added to the size of each text, for its overhead


class Sample(NamedTuple):
    """A sample. ``answers``: start and stop of labels in ``ids``, for each turn. ``turn``: its first turn, from 0."""

    ids: list[int]
    answers: list[tuple[int, int]]
    turn: int = 0


@dataclass(slots=True)
class Rule:
    """The rule for labels. ``common``: if R does not begin with C, labels begin after their common prefix.

    ``ignored``: fields that the template may drop. ``counts``: rows by the line of the report that counts them.
    ``ends``: answers by end token. ``frames``: the template's text around the texts of earlier rows.
    """

    chat: ChatTokenizer
    common: bool = False
    ignored: Collection[str] = ()
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    frames: Frames = field(default_factory=Frames)


def render_ahead(rows: Iterable[Turns], chat: ChatTokenizer) -> None:
    """Render small rows together. If one fails, it and later ones are rendered one by one in ``Turns.write``."""
    small = [row for row in rows if row.size < MOST_AHEAD]
    rendered = chat.rendering.render_ahead((row.cases(row.talk.trained), row.talk.tools) for row in small)
    for row, texts in zip(small, rendered, strict=False):
        row.rendered = texts


def encode_ahead(rows: Iterable[Turns], chat: ChatTokenizer) -> None:
    """Tokenize written rows together: a call takes longer than tokenizing a short text."""
    turns = [turn for row in rows for turn in row.turns if turn.is_behind]
    chat.encoded.fill(chain.from_iterable(turn.context for turn in turns))
    chat.answers.fill(turn.answer for turn in turns)
    chat.crossed.fill(turn.border for turn in turns)


def joined(turns: Sequence[Sample]) -> list[Sample]:
    """Return one sample with the labels of all turns, if each turn is a prefix of the last; else one per turn."""
    if len(turns) < 2:
        return list(turns)
    last, answers = turns[-1].ids, [turn.answers[0] for turn in turns]
    if all(turn.ids == last[: len(turn.ids)] for turn in turns):
        return [Sample(last, answers)]
    return [turn._replace(turn=number) for number, turn in enumerate(turns)]


def pair_of(prompt: str, answer: str, end: int, rule: Rule) -> Turns:
    """Return the sample of a prompt without a template, its answer and the end token. Raises RowError."""
    _check_own(answer, "the answer", rule.chat)
    before = rule.chat.begun_ids(prompt)
    ids = [*before, *rule.chat.answers.of(answer), end]
    rule.counts[MERGED] += rule.chat.crossed.of(rule.chat.border(prompt, answer))
    return Turns(Conversation([], []), rule, Sample(ids, [(len(before), len(ids))]))


class Turn(NamedTuple):
    """A turn as texts. ``context``: in parts that are tokenized separately. ``end``: the end token that is to be added.

    ``is_behind``: R begins with C, and ``answer`` is the rest; otherwise ``answer`` is R.
    """

    context: list[str]
    answer: str
    end: list[int]
    border: Border
    is_behind: bool


class Turns:
    """The trained turns of a row: first as checked texts, then as samples.

    ``rendered``: the texts of ``cases``, if rendered with other rows. ``size``: about the characters of all contexts.
    ``ready``: the sample of a row without a template. ``told``: lines of the report that count this row.
    """

    def __init__(self, talk: Conversation, rule: Rule, ready: Sample | None = None) -> None:
        self.ready = ready
        self.talk, self.rule, self.chat, self.turns = talk, rule, rule.chat, list[Turn]()
        self.told: set[str] = set()
        self.rendered: list[str] = []
        self._presence = Presence(rule.ignored, self.told, rule.frames)
        self._seen = talk.messages if talk.is_plain else [self.chat.seen(message) for message in talk.messages]
        self._said = [Said.of(message) for message in talk.messages]
        self._before = self._said
        if not talk.is_plain:  # later contexts may drop the reasoning of a trained answer, which is checked in its turn
            trained = set(talk.trained)
            self._before = [said.without_reasoning() if n in trained else said for n, said in enumerate(self._said)]
        self.size = sum([_TEXT + len(text) for said in self._said for _, text in said.texts])
        self.size = len(talk.trained) * (self.size if talk.tools is None else self.size + len(str(talk.tools)))
        if self.size > _MOST:
            what = f"the row has {len(talk.messages):,} messages and {len(talk.trained):,} answers to train on"
            raise RowError(f"{what}, each with all that is before it", fix="split the row, or add --train-on last")

    def cases(self, numbers: Iterable[int]) -> list[Case]:
        """Return two cases for each of these messages: its context, and the conversation up to it."""
        each = ((self._seen[: n + is_whole], not is_whole) for n in numbers for is_whole in (False, True))
        return list(each)

    def write(self) -> None:
        """Make and check the texts of all turns. Raises RowError."""
        for place, number in enumerate(self.talk.trained):
            self.turns.append(self._turn(number, self.rendered[2 * place : 2 * place + 2]))

    def samples(self) -> list[Sample]:
        """Return the samples of the written turns, and count the row."""
        samples = [self._by_itself(turn) if turn.is_behind else self._other(turn) for turn in self.turns]
        samples += [] if self.ready is None else [self.ready]
        if self.told:
            self.rule.counts.update(self.told)
        self.rule.counts[BEHIND] += self.talk.num_behind
        for sample in samples:
            self.rule.ends[sample.ids[-1]] += 1
        return joined(samples)

    def context(self) -> list[int]:
        """Return the ids before the first answer."""
        if self.ready is None:
            return self.chat.ids(self.turns[0].context)
        return self.ready.ids[: self.ready.answers[0][0]]

    def _turn(self, number: int, rendered: Sequence[str]) -> Turn:
        """Return the turn of the assistant's message ``number``. Raises RowError."""
        before, said, where = self.talk.messages[:number], self._said[number], f"message {number}"
        for field_name, text in said.texts:
            _check_own(text, f"{where}, {field_name}", self.chat)
        context, whole = rendered or self._renders(self.cases([number]))
        self._check_context(before, context, number)
        is_behind = whole.startswith(context)
        begin = len(context) if is_behind else self._common(context, whole, where)
        last = self._presence.end_of([said], whole, lambda marked: self._render([*before, *marked]), where, begin)
        stop, end = self._end(before, said, whole, last)
        parts, answer = self.chat.cut(context), whole[begin if is_behind else 0 : stop]
        return Turn(parts, answer, [] if end is None else [end], self.chat.border(parts[-1], answer), is_behind)

    def _by_itself(self, turn: Turn) -> Sample:
        before = self.chat.ids(turn.context)
        ids = [*before, *self.chat.answers.of(turn.answer), *turn.end]
        if self.chat.crossed.of(turn.border):
            self.told.add(MERGED)
        return Sample(ids, [(len(before), len(ids))])

    def _other(self, turn: Turn) -> Sample:
        """Return a sample of R, with labels from the first token that differs from C."""
        context, ids = self.chat.ids(turn.context), [*self.chat.ids(self.chat.cut(turn.answer)), *turn.end]
        self.told.add(OTHER)
        return Sample(ids, [(_common_length(context, ids), len(ids))])

    def _check_context(self, before: list[Message], context: str, number: int) -> None:
        """Raise RowError if the context lacks a text of an earlier message, except reasoning of a trained answer."""

        def render(marked: Sequence[Message]) -> str:
            return self._render([m | new for m, new in zip(before, marked, strict=True)], generates=True)

        where = f"the context of message {number}"
        self._presence.end_of(self._before[:number], context, render, where)
        if not self.talk.tools:
            return
        functions = [tool.get("function", tool) for tool in self.talk.tools]
        texts = [f.get(name) for f in functions if isinstance(f, dict) for name in ("name", "description")]
        self._presence.require("tools", (text.strip() for text in texts if isinstance(text, str)), context, where)

    def _common(self, context: str, whole: str, where: str) -> int:
        """Return the length of the common prefix. Raises RowError unless ``--border common`` allows it."""
        if not self.rule.common:
            raise RowError(
                f"{where}: the template writes the answer behind another text than generation sees: "
                f"generation sees {shorten(repr(context[-160:]), 400)}, the template writes "
                f"{shorten(repr(whole[max(0, len(context) - 160) :][:320]), 400)}",
                fix="set what the template thinks with --template-args enable_thinking=…, give another template with "
                "--chat-template, or take --border common: from where the two differ",
            )
        return _common_length(context, whole)

    def _end(self, before: list[Message], said: Said, whole: str, last: int) -> tuple[int, int | None]:
        """Return the end of the answer in ``whole``, and the end token to add (None if the text has it)."""
        marker, behind, plain = self.chat.marker.search(whole, last), [], None
        if not said.is_plain:  # special tokens of tool calls and reasoning do not end an answer
            behind, plain = list(self.chat.marker.finditer(whole, last)), self._behind_probe(before, [])
            wanted = {text for text, i in self.chat.special.items() if i in self.chat.ends} | {plain}
            marker = next((m for m in behind if m[0] in wanted), None)
        if marker is not None:
            return marker.end(), None
        followers = [{"role": "tool", "content": "y"}] if said.message.get("tool_calls") else []
        for follower in (*followers, {"role": "user", "content": "y"}):
            end = self.chat.special.get(self._behind_probe(before, [follower]) or "")
            if end in self.chat.ends:
                return len(whole), end
        if plain:  # special tokens may also quote arguments: the end is the first after which no text follows
            closing = next((m for m in behind if not self.chat.marker.sub("", whole[m.end() :]).strip()), None)
            if closing is not None:
                return closing.end(), None
        if self.chat.eos is None:
            what = "no special token ends the answer, and the tokenizer has no end token"
            raise RowError(what, fix="add the end token to the template or the tokenizer")
        return len(whole), self.chat.eos

    def _behind_probe(self, before: list[Message], after: list[Message]) -> str | None:
        """Return the special token that the template writes after a plain answer; None if there is none."""
        mark = chr(FIRST_MARK)
        try:
            text = self._render([*before, {"role": "assistant", "content": f"x{mark}"}, *after])
        except RowError:
            return None
        marker = self.chat.marker.search(text, text.rfind(mark) + 1)
        return marker[0] if marker else None

    def _render(self, messages: Sequence[Message], *, generates: bool = False) -> str:
        seen = {id(message): seen for message, seen in zip(self.talk.messages, self._seen, strict=True)}
        return self._renders([([seen.get(id(m)) or self.chat.seen(m) for m in messages], generates)])[0]

    def _renders(self, cases: Sequence[Case]) -> list[str]:
        return self.chat.render_seen(cases, self.talk.tools)


def _common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    differences = (place for place, differs in enumerate(map(ne, one, other)) if differs)
    return next(differences, min(len(one), len(other)))


def _check_own(text: str, where: str, chat: ChatTokenizer) -> None:
    if (marker := chat.marker.search(text)) is not None:
        what = f"{where} holds the special token {shorten(marker[0], 60)}: as an answer, it would be trained on as such"
        raise RowError(what, fix="take it out of the text")
