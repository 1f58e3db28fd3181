"""Checks that a chat template writes every text of a conversation.

    message    {"content": "yes", "reasoning_content": "they said yes"}
    marked     {"content": "yes①", "reasoning_content": "they said yes②"}     characters that occur nowhere else
    rendered   <|assistant|><think>they said yes②</think>yes①<|end|>      each mark follows its text: all are there

Long texts, which no template contains by chance, are searched without marks; this saves a rendering. So are short texts
if the rendered row equals the frame of an earlier, marked row around its own texts:

    frame      <|assistant|> … <|end|>             of <|assistant|>yes<|end|>, so <|assistant|>no<|end|> contains "no"
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from planner.files.text import shorten
from runtime.data.instruction.conversation import Message, Said, mapped
from runtime.data.text.documents import RowError

FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U0010fffd]")
_WORD, _MANY = re.compile(r"[\w.+-]+"), 64  # for more texts, the words of a rendering are looked up in a set
_LONG = 16  # characters: the markup of a template does not contain such a text by chance
_FIX = "give a template that writes it with --chat-template, or add --ignore-field "
_NUM_FIELDS, _NUM_FRAMES = 1024, 8  # kept at most: most rows have one of few shapes
Render = Callable[[Sequence[Message]], str]


class Frames:
    """The text that the template wrote before, between and after the texts of earlier rows, as marks showed it."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, ...], list[list[str]]] = {}  # by the fields of the texts

    def end_of(self, texts: Sequence[tuple[str, str]], rendered: str, begin: int) -> int | None:
        """Return the end of the last text, if ``rendered[begin:]`` is a known frame around ``texts``; else None."""
        for frame in self._of.get(tuple(name for name, _ in texts), ()):
            around = "".join(before + text for before, (_, text) in zip(frame, texts, strict=False))
            if rendered[begin:] == around + frame[-1]:
                return begin + len(around)
        return None

    def see(self, texts: Sequence[tuple[str, str]], ends: Sequence[Sequence[int]], rendered: str, begin: int) -> None:
        """Keep the frame around the texts, if each occurs unchanged, once and in order."""
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


class Presence:
    """Checks of one row. ``ignored``: fields that a template may drop; ``told`` collects a line for each of them."""

    def __init__(self, ignored: Collection[str], told: set[str], frames: Frames) -> None:
        self._ignored, self._told, self._frames = ignored, told, frames

    def end_of(self, said: Sequence[Said], rendered: str, render: Render, where: str, begin: int = 0) -> int:
        """Return the end of the last text of ``said`` in ``rendered``, which ``render`` returned for these messages.

        Raises RowError if a text is not in ``rendered[begin:]``.
        """
        texts = [each for one in said for each in one.texts]
        end = _end_in_order(texts, rendered, begin)
        if end is None and (
            rendered.isascii() or not _MARKS.search(rendered)
        ):  # `_marked_ends` rejects rows with marks
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
        if atoms := [atom for one in said for atom in one.atoms]:
            self.require("tool_calls", atoms, rendered[begin:], where)
        return end

    def require(self, field: str, texts: Iterable[str], rendered: str, where: str) -> None:
        """Raise RowError for a text that ``rendered`` does not contain, raw or as JSON."""
        wanted = dict.fromkeys(texts)
        words = set(_WORD.findall(rendered)) if len(wanted) > _MANY else ()
        for text in wanted:
            if text not in words and not any(form in rendered for form in _forms(text)):
                self._lacks(field, text, where)

    def _lacks(self, field: str, text: str, where: str) -> None:
        if field not in self._ignored:
            what = f"{where}: the template drops {field} {shorten(repr(text), 80)}"
            raise RowError(what, fix=f"{_FIX}{field}")
        self._told.add(f"rows of which the template drops {field}, as --ignore-field allows")


def _forms(text: str) -> tuple[str, str]:
    """Return a text as is, and as JSON writes it."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


def _end_in_order(texts: Sequence[tuple[str, str]], rendered: str, begin: int) -> int | None:
    """Return the end of the last text, if all are long, occur in order, and none occurs again after that; else None."""
    at = end = begin
    for _, text in texts:
        at = rendered.find(text, end) if len(text) >= _LONG else -1
        if at < 0:
            return None
        end = at + len(text)
    for _, text in texts:
        if rendered.find(text, at + 1) >= 0:
            return None
    return end


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark after each text, numbered in the order of ``texts_of``."""
    mark = FIRST_MARK - 1

    def change(field: str, text: str) -> str:
        nonlocal mark
        if not (kept := text.rstrip()):
            return text
        mark += 1
        return kept + chr(mark) + text[len(kept) :]

    return [mapped(message, change) for message in messages]


def _marked_ends(texts: Sequence[tuple[str, str]], rendered: str, marked: str) -> list[list[int]]:
    """Return the ends of all places of each text in ``rendered``. Raises RowError if marks change the rest of it."""
    if _MARKS.sub("", marked) != rendered or _MARKS.search(rendered):
        what = "the template changes with the last character of a text, or the row holds characters of private use"
        raise RowError(f"{what}: whether all of it is written is not known", fix="give a template that does not")
    ends: list[list[int]] = [[] for _ in texts]
    for number, mark in enumerate(_MARKS.finditer(marked)):
        place, which = mark.start() - number, ord(mark[0]) - FIRST_MARK
        if which < len(texts) and any(rendered.endswith(form, 0, place) for form in _forms(texts[which][1])):
            ends[which].append(place)
    return ends
