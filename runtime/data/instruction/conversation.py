"""A row becomes a conversation: messages with roles, the numbers of those to train on, and their texts.

openai     {"messages": [{"role": "user", "content": …}, {"role": "assistant", …, "tool_calls": […]}], "tools": […]}
sharegpt   {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}
alpaca     {"instruction": …, "input": …, "output": …, "system": …}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from planner.files.text import shorten
from runtime.data.text.documents import RowError, names_in, text_of

REASONING = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation. ``trained``: the numbers of the assistant messages that become labels. ``num_behind``: number of
    messages after the last one of the assistant, which are left out. ``format``: of the row. ``is_plain``: each message
    is only a role and a text.
    """

    messages: list[Message]
    trained: list[int]
    tools: list[Any] | None = None
    num_behind: int = 0
    format: str = "openai"
    is_plain: bool = False


def conversation_of(row: dict[str, Any], field: str | None, format: str | None, train_on: str) -> Conversation:
    """Return the conversation of a row; ``format`` None: detected. Raises RowError."""
    format = format or _format_of(row, field)
    messages = _of_alpaca(row) if format == "alpaca" else _list(row, field)
    if not (are_plain := all(map(is_plain, messages))):
        messages = [_message(message, number) for number, message in enumerate(messages)]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    kept = messages[: turns[-1] + 1] if turns else []
    num_behind = len(messages) - len(kept) if turns else 0
    trained = turns[-1 if train_on == "last" else 0 :]
    tools = _json(row.get("tools"), "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError("tools is no list of objects", fix="give a list of JSON schemas")
    if not are_plain:
        trained = [n for n in trained if kept[n].get("train", True) and kept[n].get("weight", 1)]
        kept = [{name: m[name] for name in m if name not in ("train", "weight")} for m in kept]
    return Conversation(kept, trained, tools or None, num_behind, format, are_plain)


def _format_of(row: dict[str, Any], field: str | None) -> str:
    messages = row.get(field or "")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and "from" in messages[0]:
        return "sharegpt"
    return "alpaca" if messages is None and {"instruction", "output"} <= row.keys() else "openai"


def _of_alpaca(row: dict[str, Any]) -> list[Message]:
    context = text_of({**row, "input": row.get("input") or ""}, "input")
    request = "\n\n".join(filter(None, [text_of(row, "instruction"), context]))
    system = [{"role": "system", "content": text_of(row, "system")}] if row.get("system") else []
    answer = {"role": "assistant", "content": text_of(row, "output")}
    return [*system, {"role": "user", "content": request}, answer]


def _list(row: dict[str, Any], field: str | None) -> list[Any]:
    messages = _json(row.get(field or ""), str(field))
    if not isinstance(messages, list) or not messages:
        what = f"the row has no list of messages {field!r} (there is: {names_in(row)})"
        raise RowError(what, fix="name the field of the messages with --chat")
    return messages


def _json(value: Any, field: str) -> Any:
    """Return the parsed value of a JSON string; anything else as is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise RowError(f"{field} is a text that is not JSON: {error}", fix="give a list of objects") from None


def is_plain(message: Any) -> bool:
    """Return whether a message is only a role and a text, as most are: nothing else needs to be checked in these."""
    is_pair = type(message) is dict and len(message) == 2
    return is_pair and message.get("role") in ROLES and type(message.get("content")) is str


def _message(raw: Any, number: int) -> Message:
    """Return a message with role and content, as templates read it. Raises RowError."""
    if not isinstance(raw, dict):
        raise RowError(f"message {number} is a {type(raw).__name__}", fix="give objects with role and content")
    message = dict(raw)
    if "from" in message:
        role = message.pop("from")
        message["role"] = _OF_SHAREGPT.get(role, role) if isinstance(role, str) else role
        message["content"] = message.pop("value", None)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or []
    if role not in ROLES:
        fix = f"name the roles {', '.join(ROLES)}"
        raise RowError(f"message {number} has the unknown role {shorten(repr(role), 60)}", fix=fix)
    if not isinstance(calls, list) or not all(isinstance(_called(call).get("name"), str) for call in calls):
        raise RowError(f"message {number}: a tool call has no name", fix="write {function: {name, arguments}}")
    if isinstance(content, list):
        _check_parts(content, number)
    elif not isinstance(content, str) and not (content is None and (calls or _has_reasoning(message))):
        what = f"message {number} ({role}) has no text as content"
        raise RowError(what, fix="give a text, which may be empty")
    return message


def _check_parts(content: list[Any], number: int) -> None:
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"message {number} has a part of the kind {shorten(kind, 60)}, which needs a processor"
            raise RowError(what, fix="give parts with text alone")


def _has_reasoning(message: Message) -> bool:
    return any(isinstance(message.get(name), str) for name in REASONING)


def _called(call: Any) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


class Said(NamedTuple):
    """A message with its ``texts_of`` and ``atoms_of``. ``is_plain``: it is a text that is not empty, and no more."""

    message: Message
    texts: list[tuple[str, str]]
    atoms: list[str]
    is_plain: bool

    @classmethod
    def of(cls, message: Message) -> Said:
        if is_plain(message):
            text = message["content"].strip()
            return cls(message, [("content", text)] if text else [], [], bool(text))
        texts, is_text = texts_of(message), not message.get("tool_calls") and not _has_reasoning(message)
        return cls(message, texts, atoms_of(message), is_text and bool(texts))

    def without_reasoning(self) -> Said:
        if self.is_plain or not _has_reasoning(self.message):
            return self
        return Said.of({name: value for name, value in self.message.items() if name not in REASONING})


def mapped(message: Message, change: Callable[[str, str], str]) -> Message:
    """Return the message with ``change(field, text)`` in place of each of its texts, those of reasoning first."""
    copy = dict(message)
    changed: dict[str, str] = {}  # one reasoning under several names is one text
    for name in REASONING:
        if isinstance(text := message.get(name), str):
            if text not in changed:
                changed[text] = change(name, text)
            copy[name] = changed[text]
    content = message.get("content")
    if isinstance(content, str):
        copy["content"] = change("content", content)
    elif content is not None:
        copy["content"] = [part | {"text": change("content", part["text"])} for part in content]
    if message.get("tool_calls"):
        copy["tool_calls"] = [_mapped_call(call, partial(change, "tool_calls")) for call in message["tool_calls"]]
    return copy


def _mapped_call(call: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    inner = _called(call)
    inner = inner | {name: _mapped_tree(inner[name], change) for name in ("name", "arguments") if name in inner}
    return call | {"function": inner} if "function" in call else inner


def _mapped_tree(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped_tree(each, change) for name, each in value.items()}
    return [_mapped_tree(each, change) for each in value] if isinstance(value, list) else value


def texts_of(message: Message) -> list[tuple[str, str]]:
    """Return (field, text without outer white space) of each text that is not empty, in the order of ``mapped``."""
    texts: list[tuple[str, str]] = []

    def note(field: str, text: str) -> str:
        texts.append((field, text.strip()))
        return text

    mapped(message, note)
    return [each for each in texts if each[1]]


def atoms_of(message: Message) -> list[str]:
    """Return the names and numbers in the arguments of tool calls: every template writes them as JSON does."""
    atoms: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        atoms.extend(name for name, _ in pairs)

    for call in message.get("tool_calls") or ():
        text = json.dumps(_called(call).get("arguments"), default=str)
        json.loads(text, object_pairs_hook=note, parse_int=atoms.append, parse_float=atoms.append)
    return atoms
