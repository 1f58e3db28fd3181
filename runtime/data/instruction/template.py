"""Renders chat templates as transformers does, within limits of time and memory.

transformers prepares messages for a template: it drops None, adds names of reasoning and converts to plain types. Here
its functions prepare each message once, not for every text that contains it: rendering all turns of a conversation
through `apply_chat_template` takes twice as long. Since a release of transformers may prepare messages differently, a
template that prints its whole input is first rendered in both ways. If the texts differ, `apply_chat_template` is used.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import lru_cache, partial
from typing import Any

from passes.errors import first_line
from planner.files.text import shorten
from runtime.data.instruction.conversation import Message, is_plain
from runtime.data.text.documents import RowError

Case = tuple[Sequence[Message], bool]  # messages of `ChatTemplate.seen`, and whether the assistant's turn is begun
_MOST_SECONDS, _MOST_BYTES = 10.0, 1 << 29  # limits of one call: a template may loop, or write 'x' * 999999999
_SHOWS = "{{ messages | tojson }}{{ tools | tojson }}{{ documents }}{{ add_generation_prompt }}"
_OF_DICTS = frozenset(dir(dict))
_TOOLS = [{"type": "function", "function": {"name": "h", "parameters": {"i": None}}}]
_MESSAGES = [
    {"role": "system", "content": None, "name": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}], "when": date(2025, 1, 2), "size": 1.5},
    {"role": "assistant", "content": "c", "reasoning": "d", "tool_calls": [{"name": "e", "f": [1, None]}]},
    {"role": "assistant", "content": "", "thinking": "g"},
    {"role": "user", "content": " j\n"},
]


class ChatTemplate:
    """A chat template. ``template``: its text or name; None: the tokenizer's. ``strftime``: formats the date."""

    def __init__(
        self, tokenizer: Any, template: str | None, arguments: Mapping[str, Any], strftime: Callable[[str], str]
    ) -> None:
        from transformers.utils import chat_template_utils

        self._tokenizer, self._template, self._strftime = tokenizer, template, strftime
        self._arguments = dict(arguments)
        self._plain = getattr(chat_template_utils, "_plain_template_data", lambda value: value)
        self._aliased = getattr(chat_template_utils, "_alias_reasoning_fields", lambda messages: messages)
        # only the compiled template gives access to its clock
        self._compile = chat_template_utils._compile_jinja_template
        self._chosen: dict[bool, tuple[str, Any, dict[str, Any]]] = {}
        self._is_direct = self._sees_the_same()

    def seen(self, message: Message) -> Message:
        """Return a message as the template sees it."""
        if not self._is_direct or is_plain(message):
            return message
        return self._aliased([self._plain({name: value for name, value in message.items() if value is not None})])[0]

    def render(self, cases: Sequence[Case], tools: list[Any] | None) -> list[str]:
        """Return the text of each case. Raises RowError if the template fails or exceeds the limits."""
        try:
            return _limited(lambda: self._texts(cases, tools))
        except KeyboardInterrupt:
            raise
        except Exception as error:
            is_large = isinstance(error, MemoryError)
            words = f"it takes more than {_MOST_BYTES >> 20} MiB" if is_large else shorten(first_line(error), 300)
            fix = "correct the row, or choose another template with --chat-template"
            raise RowError(f"the chat template fails: {words}", fix=fix) from None

    def render_ahead(self, rows: Iterable[tuple[Sequence[Case], list[Any] | None]]) -> list[list[str]]:
        """Return the texts of many rows, up to the first that fails.

        Rows share the limits: setting them takes longer than rendering a short row.
        """
        texts: list[list[str]] = []

        def render() -> list[str]:
            for cases, tools in rows:
                texts.append(self._texts(cases, tools))
            return []

        with suppress(Exception):
            _limited(render)
        return texts

    def _texts(self, cases: Sequence[Case], tools: list[Any] | None) -> list[str]:
        if (tools is None) not in self._chosen:
            chosen = self._tokenizer.get_chat_template(self._template, tools)
            self._chosen[tools is None] = (chosen, *self._compiled(chosen))
        chosen, compiled, names = self._chosen[tools is None]
        names = names | {"tools": self._plain(tools)}
        return [
            self._direct(compiled, names, seen, generates)
            if self._is_direct and seen
            else self._through(chosen, seen, tools, generates)
            for seen, generates in cases
        ]

    def _compiled(self, template: str) -> tuple[Any, dict[str, Any]]:
        """Return the compiled template and its variables, except those of a conversation."""
        compiled = self._compile(template)
        compiled.globals["strftime_now"] = self._strftime
        compiled.environment.getattr = partial(_attribute, compiled.environment)
        own = {**self._tokenizer.special_tokens_map, **self._arguments}
        return compiled, {**compiled.globals, **self._plain(own), "documents": None}

    def _direct(self, compiled: Any, names: dict[str, Any], seen: Sequence[Message], generates: bool) -> str:
        names = {**names, "messages": list(seen), "add_generation_prompt": generates}
        environment = compiled.environment
        context = environment.context_class(environment, names, compiled.name, compiled.blocks)
        return environment.concat(compiled.root_render_func(context))

    def _through(self, template: str, messages: Sequence[Message], tools: list[Any] | None, generates: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template,
            add_generation_prompt=generates,
            tokenize=False,
            **self._arguments,
        )

    def _sees_the_same(self) -> bool:
        self._is_direct = True
        try:
            own = {**self._tokenizer.special_tokens_map, **self._arguments}
            shows = _SHOWS + "".join(f"{{{{ {name} }}}}" for name in own)
            compiled, names = self._compiled(shows)
            seen = [self.seen(message) for message in _MESSAGES]
            cases = ((_TOOLS, True), (None, False))
            direct = [self._direct(compiled, names | {"tools": self._plain(t)}, seen, g) for t, g in cases]
            return direct == [self._through(shows, _MESSAGES, *case) for case in cases]
        except Exception:
            return False


def _attribute(environment: Any, obj: Any, attribute: str) -> Any:
    """Return an attribute as the sandbox does, but look up fields of dicts first, which saves an exception."""
    if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
        return obj[attribute]
    return type(environment).getattr(environment, obj, attribute)


@lru_cache(1)
def _statm(pid: int) -> int:
    """Return the open file with the memory sizes of process ``pid``: opening it takes longer than rendering."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _limited(render: Callable[[], list[str]]) -> list[str]:
    """Return the result of ``render``. Raises MemoryError beyond ``_MOST_BYTES`` (on Linux), and the TimeoutError of
    ``_timed``.
    """
    try:
        import resource

        now = int(os.pread(_statm(os.getpid()), 32, 0).split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return _timed(render)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [n for n in (now + _MOST_BYTES, soft, hard) if n != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        return _timed(render)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _timed(render: Callable[[], list[str]]) -> list[str]:
    """Return the result of ``render``. Raises TimeoutError after ``_MOST_SECONDS``, in the main thread only."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {_MOST_SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        return render()
    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
    try:
        return render()
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)
