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
from collections.abc import Callable, Collection, Sequence
from typing import Any

from planner.files.text import shorten
from runtime.data.instruction.conversation import Message, RowError, atoms_of, mapped, texts_of

FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U0010fffd]")
_LONG = 16  # characters: no markup of a template holds such a text by chance
_FIX = "give a template that writes it with --chat-template, or add --ignore-field "

Render = Callable[[Sequence[Message]], str]


class Presence:
    """``ignored``: fields that a template may drop, counted in ``told``."""

    def __init__(self, ignored: Collection[str], told: Counter[str]) -> None:
        self._ignored, self._told = ignored, told

    def check(self, messages: Sequence[Message], rendered: str, render: Render, where: str) -> None:
        """Raise RowError if a text of ``messages`` does not stand in ``rendered``, which ``render`` made of them."""
        texts = texts_of(messages)
        if not _in_order(texts, rendered):
            ends = _marked_ends(texts, rendered, render(_marked(messages)))
            for (field, text), places in zip(texts, ends, strict=True):
                if not places:
                    self._lacks(field, text, where)
        self._check_atoms(messages, rendered, where)

    def end_of(self, message: Message, whole: str, begin: int, render: Render, where: str) -> int:
        """Where the last character of the message's texts ends in ``whole``, of which they stand behind ``begin``.

        Raises RowError if one does not.
        """
        texts, answer, found = texts_of([message]), whole[begin:], begin
        if all(len(text) >= _LONG and answer.count(text) == 1 for _, text in texts):
            found = max([begin, *(begin + answer.index(text) + len(text) for _, text in texts)])
        else:
            ends = _marked_ends(texts, whole, render(_marked([message])))
            for (field, text), places in zip(texts, ends, strict=True):
                here = [place for place in places if place - len(text) >= begin]
                found = max([found, *here])
                if not here:
                    self._lacks(field, text, where)
        self._check_atoms([message], answer, where)
        return found

    def check_tools(self, tools: list[Any], context: str, where: str) -> None:
        """Raise RowError if the template drops a tool. Names and descriptions stand raw or as JSON."""
        for tool in tools:
            function = tool.get("function", tool)
            for text in (function.get("name"), function.get("description")) if isinstance(function, dict) else ():
                if isinstance(text, str) and not any(form in context for form in _forms(text.strip())):
                    self._lacks("tools", text, where)

    def _check_atoms(self, messages: Sequence[Message], rendered: str, where: str) -> None:
        for message in messages:
            for atom in atoms_of(message):
                if not any(form in rendered for form in _forms(atom)):
                    self._lacks("tool_calls", atom, where)

    def _lacks(self, field: str, text: str, where: str) -> None:
        if field not in self._ignored:
            what = f"{where}: the template drops {field} {shorten(repr(text), 80)}"
            raise RowError(what, fix=f"{_FIX}{field}")
        self._told[f"rows of which the template drops {field}, as --ignore-field allows"] = 1


def _forms(text: str) -> tuple[str, str]:
    """A text, and how JSON writes it."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1]


def _in_order(texts: Sequence[tuple[str, str]], rendered: str) -> bool:
    """Whether long texts stand one behind the other."""
    place = 0
    for _, text in texts:
        at = rendered.find(text, place) if len(text) >= _LONG else -1
        if at < 0:
            return False
        place = at + len(text)
    return True


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
