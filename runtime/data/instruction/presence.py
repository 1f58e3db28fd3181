"""Whether the texts of a conversation stand in the text that a template makes of it, and where they end.

    message    {"content": "yes", "reasoning_content": "they said yes"}
    marked     {"content": "yes①", "reasoning_content": "they said yes②"}     characters that occur nowhere else
    rendered   <|assistant|><think>they said yes②</think>yes①<|end|>      each mark behind its text: it stands there

Texts too long to stand anywhere by chance are looked for without marks, which saves a rendering.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from planner.files.text import shorten
from runtime.data.instruction.conversation import Message, atoms_of, mapped, texts_of
from runtime.data.text.rows import RowError

FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U0010fffd]")
_LONG = 16  # characters: no markup of a template holds such a text by chance
_FIX = "give a template that writes it with --chat-template, or add --ignore-field "

Render = Callable[[Sequence[Message]], str]


class Presence:
    """``ignored``: fields that a template may drop, counted in ``told``."""

    def __init__(self, ignored: Collection[str], told: Counter[str]) -> None:
        self._ignored, self._told = ignored, told

    def end_of(self, messages: Sequence[Message], rendered: str, render: Render, where: str, begin: int = 0) -> int:
        """Where the last character of the messages' texts ends in ``rendered``, which ``render`` made of them, and in
        which all of them stand behind ``begin``.

        Raises RowError if one does not.
        """
        texts = texts_of(messages)
        end = _end_in_order(texts, rendered, begin)
        if end is None:
            end = begin
            marked = _marked_ends(texts, rendered, render(_marked(messages)))
            for (field, text), places in zip(texts, marked, strict=True):
                here = [place for place in places if place - len(text) >= begin]
                end = max([end, *here])
                if not here:
                    self._lacks(field, text, where)
        self.require("tool_calls", atoms_of(messages), rendered[begin:], where)
        return end

    def require(self, field: str, texts: Iterable[str], rendered: str, where: str) -> None:
        """Raise RowError for a text that does not stand there, raw or as JSON."""
        for text in texts:
            if not any(form in rendered for form in _forms(text)):
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
