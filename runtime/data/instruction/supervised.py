"""Which tokens of a conversation are labels: those that the model would generate, where it would generate them.

    C        the template on the messages before it, with the generation prompt     <|user|>hi<|assistant|>
    R        the template on the messages up to it                                  <|user|>hi<|assistant|>yes<|end|>
    ids      C as generation tokenizes it, then the answer by itself                <|user|>hi<|assistant|> + yes<|end|>
    labels   the answer's tokens, through the one that ends it                                                yes<|end|>

Several turns are one sample only if each of their contexts is a prefix of its ids, and each answer stands in it.

The texts of a conversation must stand in the text that a template makes of it:

    message    {"content": "yes", "reasoning_content": "they said yes"}
    marked     {"content": "yes①", "reasoning_content": "they said yes②"}     characters that occur nowhere else
    rendered   <|assistant|><think>they said yes②</think>yes①<|end|>      each mark behind its text: it stands there

Texts too long to stand anywhere by chance are looked for without marks, which saves a rendering. So are shorter
ones, if what stands around them is, to the letter, what marks found around the texts of an earlier row:

    frame      <|assistant|> … <|end|>             of <|assistant|>yes<|end|>, so "no" stands in <|assistant|>no<|end|>
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.files.text import shorten
from runtime.data.instruction.chat_tokenizer import ChatTokenizer
from runtime.data.instruction.conversation import Conversation, Message, Said, mapped
from runtime.data.instruction.template import Case
from runtime.data.text.documents import RowError

MERGED, OTHER, BEHIND = (
    "rows with a border over which the tokenizer would merge characters: no token crosses it",
    "rows with other tokens than generation sees, of --border common",
    "messages behind the last of the assistant, left out",
)
FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U0010fffd]")
_WORD, _MANY = re.compile(r"[\w.+-]+"), 64  # from so many texts on, words of a rendering are looked up, not searched
_LONG = 16  # characters: no markup of a template holds such a text by chance
_FIX = "give a template that writes it with --chat-template, or add --ignore-field "
_NUM_FIELDS, _NUM_FRAMES = 1024, 8  # kept at most: most rows have one of few shapes
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """``answers``: start and stop of the labels in ``ids``, one a turn. ``turn``: the first of them, from 0."""

    ids: list[int]
    answers: list[tuple[int, int]]
    turn: int = 0


class Frames:
    """What the template wrote before, between and behind the texts of a row, as marks found it."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, ...], list[list[str]]] = {}  # by the fields of the texts

    def end_of(self, texts: Sequence[tuple[str, str]], rendered: str, begin: int) -> int | None:
        """Where the last text ends, if one of them with these texts is all that stands behind ``begin``."""
        for frame in self._of.get(tuple(name for name, _ in texts), ()):
            around = "".join(before + text for before, (_, text) in zip(frame, texts, strict=False))
            if rendered[begin:] == around + frame[-1]:
                return begin + len(around)
        return None

    def see(self, texts: Sequence[tuple[str, str]], ends: Sequence[Sequence[int]], rendered: str, begin: int) -> None:
        """Keep what is around texts that stand in their order, each at one place and unchanged."""
        frame, at = [], begin
        for (_, text), places in zip(texts, ends, strict=True):
            start = places[0] - len(text) if len(places) == 1 else -1
            if start < at or not rendered.startswith(text, start):
                return
            frame.append(rendered[at:start])
            at = places[0]
        fields = tuple(name for name, _ in texts)
        if fields in self._of or len(self._of) < _NUM_FIELDS:
            kept = self._of.setdefault(fields, [])
            kept += [[*frame, rendered[at:]]] if len(kept) < _NUM_FRAMES else []


@dataclass(slots=True)
class Rule:
    """``common``: where R does not begin with C, take their common prefix. ``ignored``: fields that may be dropped.

    Owns ``counts`` of rows by what is to be reported, and of answers by their end token.
    ``frames``: what the template wrote around the texts of earlier rows.
    """

    chat: ChatTokenizer
    common: bool = False
    ignored: Collection[str] = ()
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    frames: Frames = field(default_factory=Frames)


def samples_of(talk: Conversation, rule: Rule) -> list[Sample]:
    """One sample for all trained turns, or one each. Raises RowError."""
    found = _Turns(talk, rule)
    turns = [found.turn(number) for number in talk.trained]
    rule.counts.update(found.told)
    rule.counts[BEHIND] += talk.num_behind
    rule.ends.update(turn.ids[-1] for turn in turns)
    return joined(turns)


def joined(turns: Sequence[Sample]) -> list[Sample]:
    """The last sample with the labels of all, if it holds each of the others where generation would have it."""
    last, answers = turns[-1].ids if turns else [], [turn.answers[0] for turn in turns]
    if all(turn.ids == last[: len(turn.ids)] for turn in turns):
        return [Sample(last, answers)] if turns else []
    return [replace(turn, turn=number) for number, turn in enumerate(turns)]


def pair_of(prompt: str, answer: str, end: int, rule: Rule) -> Sample:
    """A prompt without a template, its answer, and the end token. Raises RowError."""
    _check_own(answer, "the answer", rule.chat)
    before = rule.chat.begun_ids(prompt)
    ids = [*before, *rule.chat.answer_ids(answer), end]
    rule.counts[MERGED] += rule.chat.crosses(prompt, answer)
    rule.ends[end] += 1
    return Sample(ids, [(len(before), len(ids))])


class _Turns:
    """The samples of single turns. Owns the counts of its row."""

    def __init__(self, talk: Conversation, rule: Rule) -> None:
        self.talk, self.rule, self.chat = talk, rule, rule.chat
        self.told: Counter[str] = Counter()
        self._presence = Presence(rule.ignored, self.told, rule.frames)
        self._seen = {id(message): self.chat.seen(message) for message in talk.messages}
        self._said = [Said.of(message) for message in talk.messages]
        trained = set(talk.trained)
        # reasoning of an answer that is trained on has to stand in that answer, and may be left out of later contexts
        self._before = [said.without_reasoning() if n in trained else said for n, said in enumerate(self._said)]

    def turn(self, number: int) -> Sample:
        """The sample of the assistant's message ``number`` alone. Raises RowError."""
        before, said, where = self.talk.messages[:number], self._said[number], f"message {number}"
        for field_name, text in said.texts:
            _check_own(text, f"{where}, {field_name}", self.chat)
        context, whole = self._renders((before, True), ([*before, said.message], False))
        self._check_context(before, context, number)
        is_behind = whole.startswith(context)
        begin = len(context) if is_behind else self._common(context, whole, where)
        last = self._presence.end_of([said], whole, lambda marked: self._render([*before, *marked]), where, begin)
        stop, end = self._end(before, said, whole, last)
        return (
            self._by_itself(context, whole[begin:stop], end) if is_behind else self._other(context, whole[:stop], end)
        )

    def _by_itself(self, context: str, answer: str, end: int | None) -> Sample:
        before = self.chat.ids(context)
        ids = [*before, *self.chat.answer_ids(answer), *([] if end is None else [end])]
        if self.chat.crosses(context, answer):
            self.told[MERGED] = 1
        return Sample(ids, [(len(before), len(ids))])

    def _other(self, context: str, whole: str, end: int | None) -> Sample:
        """From where the tokens of both differ."""
        seen, ids = self.chat.ids(context), [*self.chat.ids(whole), *([] if end is None else [end])]
        border = next((n for n, (a, b) in enumerate(zip(seen, ids, strict=False)) if a != b), min(len(seen), len(ids)))
        self.told[OTHER] = 1
        return Sample(ids, [(border, len(ids))])

    def _check_context(self, before: list[Message], context: str, number: int) -> None:
        """Raise RowError if a text of an earlier message stands neither here nor, of reasoning, in its own answer."""

        def render(marked: Sequence[Message]) -> str:
            return self._render([m | new for m, new in zip(before, marked, strict=True)], generates=True)

        where = f"the context of message {number}"
        self._presence.end_of(self._before[:number], context, render, where)
        functions = [tool.get("function", tool) for tool in self.talk.tools or ()]
        told = [f.get(name) for f in functions if isinstance(f, dict) for name in ("name", "description")]
        self._presence.require("tools", (text.strip() for text in told if isinstance(text, str)), context, where)

    def _common(self, context: str, whole: str, where: str) -> int:
        """The characters that both have. Raises RowError unless they were asked for."""
        if not self.rule.common:
            raise RowError(
                f"{where}: the template writes the answer behind another text than generation sees: "
                f"generation sees {shorten(repr(context[-160:]), 400)}, the template writes "
                f"{shorten(repr(whole[max(0, len(context) - 160) :][:320]), 400)}",
                fix="set what the template thinks with --template-args enable_thinking=…, give another template with "
                "--chat-template, or take --border common: from where the two differ",
            )
        pairs = enumerate(zip(context, whole, strict=False))
        return next((n for n, (a, b) in pairs if a != b), min(len(context), len(whole)))

    def _end(self, before: list[Message], said: Said, whole: str, last: int) -> tuple[int, int | None]:
        """Where the answer's text stops, and the end token to add, None if the text has it."""
        behind, plain = list(self.chat.special_in(whole, last)), None
        found = behind[0] if behind else None
        if not said.is_plain:  # markers of tool calls and reasoning end nothing
            plain = self._behind_probe(before, [])
            wanted = {text for text, i in self.chat.special.items() if i in self.chat.ends} | {plain}
            found = next((m for m in behind if m[0] in wanted), None)
        if found is not None:
            return found.end(), None
        followers = [{"role": "tool", "content": "y"}] if said.message.get("tool_calls") else []
        for follower in (*followers, {"role": "user", "content": "y"}):
            end = self.chat.special.get(self._behind_probe(before, [follower]) or "")
            if end in self.chat.ends:
                return len(whole), end
        if plain:  # quotation marks of arguments may be special tokens too: behind the last marker stands no text
            closing = next((m for m in behind if not self.chat.without_special(whole[m.end() :]).strip()), None)
            if closing is not None:
                return closing.end(), None
        if self.chat.eos is None:
            what = "no special token ends the answer, and the tokenizer has no end token"
            raise RowError(what, fix="add the end token to the template or the tokenizer")
        return len(whole), self.chat.eos

    def _behind_probe(self, before: list[Message], after: list[Message]) -> str | None:
        """The special token behind an answer of a text alone; None if there is none."""
        mark = chr(FIRST_MARK)
        try:
            text = self._render([*before, {"role": "assistant", "content": f"x{mark}"}, *after])
        except RowError:
            return None
        return next((found[0] for found in self.chat.special_in(text, text.rfind(mark) + 1)), None)

    def _render(self, messages: Sequence[Message], *, generates: bool = False) -> str:
        return self._renders((messages, generates))[0]

    def _renders(self, *cases: Case) -> list[str]:
        seen = [([self._seen.get(id(m)) or self.chat.seen(m) for m in messages], how) for messages, how in cases]
        return self.chat.render_seen(seen, self.talk.tools)


def _check_own(text: str, where: str, chat: ChatTokenizer) -> None:
    if (found := next(chat.special_in(text), None)) is not None:
        what = f"{where} holds the special token {shorten(found[0], 60)}: as an answer, it would be trained on as such"
        raise RowError(what, fix="take it out of the text")


class Presence:
    """``ignored``: fields that a template may drop, counted in ``told``."""

    def __init__(self, ignored: Collection[str], told: Counter[str], frames: Frames) -> None:
        self._ignored, self._told, self._frames = ignored, told, frames

    def end_of(self, said: Sequence[Said], rendered: str, render: Render, where: str, begin: int = 0) -> int:
        """Where the last character of the messages' texts ends in ``rendered``, which ``render`` made of them, and in
        which all of them stand behind ``begin``.

        Raises RowError if one does not.
        """
        texts = [each for one in said for each in one.texts]
        end = _end_in_order(texts, rendered, begin)
        if end is None and not _MARKS.search(rendered):  # rows with such characters are refused wherever they stand
            end = self._frames.end_of(texts, rendered, begin)
        if end is None:
            end = begin
            marked = _marked_ends(texts, rendered, render(_marked([one.message for one in said])))
            for (field, text), places in zip(texts, marked, strict=True):
                here = [place for place in places if place - len(text) >= begin]
                end = max([end, *here])
                if not here:
                    self._lacks(field, text, where)
            self._frames.see(texts, marked, rendered, begin)
        if any(one.atoms for one in said):
            self.require("tool_calls", (atom for one in said for atom in one.atoms), rendered[begin:], where)
        return end

    def require(self, field: str, texts: Iterable[str], rendered: str, where: str) -> None:
        """Raise RowError for a text that does not stand there, raw or as JSON."""
        wanted = dict.fromkeys(texts)
        words = set(_WORD.findall(rendered)) if len(wanted) > _MANY else ()
        for text in wanted:
            if text not in words and not any(form in rendered for form in _forms(text)):
                self._lacks(field, text, where)

    def _lacks(self, field: str, text: str, where: str) -> None:
        if field not in self._ignored:
            what = f"{where}: the template drops {field} {shorten(repr(text), 80)}"
            raise RowError(what, fix=f"{_FIX}{field}")
        self._told[f"rows of which the template drops {field}, as --ignore-field allows"] = 1


def _forms(text: str) -> tuple[str, str]:
    """A text, and how JSON writes it."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


def _end_in_order(texts: Sequence[tuple[str, str]], rendered: str, begin: int) -> int | None:
    """Where the last text ends, if all are long, stand one behind the other, and none stands behind the last again."""
    at = end = begin
    for _, text in texts:
        at = rendered.find(text, end) if len(text) >= _LONG else -1
        if at < 0:
            return None
        end = at + len(text)
    return None if any(rendered.find(text, at + 1) >= 0 for _, text in texts) else end


def _marked(messages: Sequence[Message]) -> list[Message]:
    """With a mark behind each text, in the order of ``texts_of``."""
    mark = FIRST_MARK - 1

    def change(field: str, text: str) -> str:
        nonlocal mark
        if not (kept := text.rstrip()):
            return text
        mark += 1
        return kept + chr(mark) + text[len(kept) :]

    return [mapped(message, change) for message in messages]


def _marked_ends(texts: Sequence[tuple[str, str]], rendered: str, marked: str) -> list[list[int]]:
    """Of each text, the ends of its places in ``rendered``. Raises RowError if a mark changes more than itself."""
    if _MARKS.sub("", marked) != rendered or _MARKS.search(rendered):
        what = "the template changes with the last character of a text, or the row holds characters of private use"
        raise RowError(f"{what}: whether all of it is written is not known", fix="give a template that does not")
    ends: list[list[int]] = [[] for _ in texts]
    for number, found in enumerate(_MARKS.finditer(marked)):
        place, which = found.start() - number, ord(found[0]) - FIRST_MARK
        if which < len(texts) and any(rendered.endswith(form, 0, place) for form in _forms(texts[which][1])):
            ends[which].append(place)
    return ends
