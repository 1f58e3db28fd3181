"""A row becomes a conversation: messages with roles, which of them are trained on, and the texts that they hold.

openai     {"messages": [{"role": "user", "content": …}, {"role": "assistant", …, "tool_calls": […]}], "tools": […]}
sharegpt   {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}
alpaca     {"instruction": …, "input": …, "output": …, "system": …}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from passes.errors import PlanError
from planner.files.text import shorten

REASONING = ("reasoning_content", "reasoning", "thinking")
FORMATS = ("openai", "sharegpt", "alpaca")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
Message = dict[str, Any]


class RowError(PlanError):
    """A row that gives no samples without a change."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """``trained``: the numbers of the assistant messages that are labels. ``num_behind``: messages left out after the
    last one of the assistant. ``format``: of the row."""

    messages: list[Message]
    trained: list[int]
    tools: list[Any] | None = None
    num_behind: int = 0
    format: str = "openai"


def conversation_of(row: Mapping[str, Any], field: str | None, format: str | None, train_on: str) -> Conversation:
    """The conversation of a row. Raises RowError."""
    found = format or format_of(row, field)
    messages = _of_alpaca(row) if found == "alpaca" else [_message(m, n) for n, m in enumerate(_list(row, field))]
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    turns = [n for n in range(last + 1) if messages[n]["role"] == "assistant"]
    if train_on == "last":
        turns = turns[-1:]
    trained = [n for n in turns if messages[n].get("train", True) and messages[n].get("weight", 1)]
    tools = row.get("tools")
    tools = _json(tools, "tools") if isinstance(tools, str) else tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowError("tools is no list of objects", fix="give a list of JSON schemas")
    kept = [{name: value for name, value in m.items() if name not in ("train", "weight")} for m in messages[: last + 1]]
    return Conversation(kept, trained, tools or None, len(messages) - len(kept) if turns else 0, found)


def format_of(row: Mapping[str, Any], field: str | None) -> str:
    """The format that the row has by its fields."""
    messages = row.get(field or "")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and "from" in messages[0]:
        return "sharegpt"
    return "alpaca" if messages is None and {"instruction", "output"} <= row.keys() else "openai"


def pair(prompt: str, answer: str) -> Conversation:
    """One message of the user, one of the assistant."""
    return Conversation([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], [1])


def text_of(row: Mapping[str, Any], field: str) -> str:
    """Raises RowError if the row has no such text."""
    if not isinstance(text := row.get(field), str):
        raise RowError(f"the row has no text {field!r} (there is: {_fields(row)})", fix="name a field that holds text")
    return text


def _fields(row: Mapping[str, Any]) -> str:
    return shorten(", ".join(map(str, list(row)[:8])), 200)


def _of_alpaca(row: Mapping[str, Any]) -> list[Message]:
    parts = [text_of(row, "instruction"), row.get("input") or ""]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    asked = {"role": "user", "content": "\n\n".join(filter(None, parts))}
    return [*system, asked, {"role": "assistant", "content": text_of(row, "output")}]


def _list(row: Mapping[str, Any], field: str | None) -> list[Any]:
    messages = row.get(field or "")
    messages = _json(messages, str(field)) if isinstance(messages, str) else messages
    if not isinstance(messages, list) or not messages:
        what = f"the row has no list of messages {field!r} (there is: {_fields(row)})"
        raise RowError(what, fix="name the field of the messages with --chat")
    return messages


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{field} is a text that is not JSON: {error}", fix="give a list of objects") from None


def _message(given: Any, number: int) -> Message:
    """With role and content, as templates read it."""
    if not isinstance(given, dict):
        raise RowError(f"message {number} is a {type(given).__name__}", fix="give objects with role and content")
    message = dict(given)
    if "from" in message:
        role = message.pop("from")
        message |= {"role": _OF_SHAREGPT.get(role, role), "content": message.pop("value", None)}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        fix = f"name the roles {', '.join(ROLES)}"
        raise RowError(f"message {number} has the unknown role {shorten(repr(role), 60)}", fix=fix)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(_called(call).get("name"), str) for call in calls):
        raise RowError(f"message {number}: a tool call has no name", fix="write {function: {name, arguments}}")
    if isinstance(content, list):
        _check_parts(content, number)
    elif not isinstance(content, str) and not (content is None and (calls or _has_reasoning(message))):
        fix = "give a text, which may be empty"
        raise RowError(f"message {number} ({role}) has no text as content", fix=fix)
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


def is_plain(message: Message) -> bool:
    """Whether it is a text and no more."""
    return not message.get("tool_calls") and not _has_reasoning(message) and bool(_joined(message).strip())


def _joined(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def mapped(message: Message, change: Callable[[str, str], str]) -> Message:
    """The message with ``change(field, text)`` in place of each of its texts, those of reasoning first."""
    found = dict(message)
    changed: dict[str, str] = {}  # one reasoning under several names is one text
    for name in REASONING:
        if isinstance(text := message.get(name), str):
            if text not in changed:
                changed[text] = change(name, text)
            found[name] = changed[text]
    content = message.get("content")
    if isinstance(content, str):
        found["content"] = change("content", content)
    elif content is not None:
        found["content"] = [part | {"text": change("content", part["text"])} for part in content]
    if message.get("tool_calls"):
        found["tool_calls"] = [_mapped_call(call, change) for call in message["tool_calls"]]
    return found


def _mapped_call(call: dict[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    inner = _called(call)
    made = inner | {"name": change("tool_calls", inner["name"])}
    if "arguments" in inner:
        made["arguments"] = _mapped_tree(inner["arguments"], change)
    return call | {"function": made} if "function" in call else made


def _mapped_tree(value: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return change("tool_calls", value)
    if isinstance(value, dict):
        return {name: _mapped_tree(each, change) for name, each in value.items()}
    return [_mapped_tree(each, change) for each in value] if isinstance(value, list) else value


def texts_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(field, text without outer white space) of each text that is not empty, in the order of ``mapped``."""
    found: list[tuple[str, str]] = []

    def note(field: str, text: str) -> str:
        if text.strip():
            found.append((field, text.strip()))
        return text

    for message in messages:
        mapped(message, note)
    return found


def atoms_of(message: Message) -> list[str]:
    """The names and numbers in the arguments of tool calls: no template writes them otherwise than JSON does."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(json.dumps(value))
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(each)

    for call in message.get("tool_calls") or []:
        walk(_called(call).get("arguments"))
    return found
