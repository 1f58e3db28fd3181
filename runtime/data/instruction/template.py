"""A chat template on messages, as transformers renders it, within limits of time and memory.

What a template sees of a message (None left out, names of reasoning, plain types) is made once a message by the
functions of transformers itself, and not again for each of the texts that hold it: rendering all turns of a
conversation through `apply_chat_template` takes twice as long. Another release of transformers may prepare messages in
another way, so a template that prints all it sees is rendered in both ways first, and if they differ, all are rendered
through `apply_chat_template`.
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
_MOST_SECONDS, _MOST_BYTES = 10.0, 1 << 29  # of the texts of one turn: a template may loop, or write 'x' * 999999999
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
    """``template``: the text or the name of one; None: the tokenizer's. ``strftime``: of the day that it sees."""

    def __init__(
        self, tokenizer: Any, template: str | None, arguments: Mapping[str, Any], strftime: Callable[[str], str]
    ) -> None:
        from transformers.utils import chat_template_utils

        self._tokenizer, self._template, self._strftime = tokenizer, template, strftime
        self._arguments = dict(arguments)
        self._plain = getattr(chat_template_utils, "_plain_template_data", lambda value: value)
        self._aliased = getattr(chat_template_utils, "_alias_reasoning_fields", lambda messages: messages)
        # the only place through which the clock of a template can be set
        self._compile = chat_template_utils._compile_jinja_template
        self._chosen: dict[bool, tuple[str, Any, dict[str, Any]]] = {}
        self._is_direct = self._sees_the_same()

    def seen(self, message: Message) -> Message:
        """What a template sees of a message."""
        if not self._is_direct or is_plain(message):
            return message
        return self._aliased([self._plain({name: value for name, value in message.items() if value is not None})])[0]

    def render(self, cases: Sequence[Case], tools: list[Any] | None) -> list[str]:
        """A text of each. Raises RowError if the template fails."""
        try:
            return _limited(lambda: self._texts(cases, tools))
        except KeyboardInterrupt:
            raise
        except Exception as error:
            is_large = isinstance(error, MemoryError)
            words = f"it takes more than {_MOST_BYTES >> 20} MiB" if is_large else shorten(first_line(error), 300)
            fix = "correct the row, or choose another template with --chat-template"
            raise RowError(f"the chat template fails: {words}", fix=fix) from None

    def render_ahead(self, asked: Iterable[tuple[Sequence[Case], list[Any] | None]]) -> list[list[str]]:
        """The texts of many, up to the first that fails: to set limits takes longer than to render a short row."""
        found: list[list[str]] = []

        def render() -> list[str]:
            for cases, tools in asked:
                found.append(self._texts(cases, tools))
            return []

        with suppress(Exception):
            _limited(render)
        return found

    def _texts(self, cases: Sequence[Case], tools: list[Any] | None) -> list[str]:
        if (tools is None) not in self._chosen:
            chosen = self._tokenizer.get_chat_template(self._template, tools)
            self._chosen[tools is None] = (chosen, *self._compiled(chosen))
        chosen, compiled, names = self._chosen[tools is None]
        given = names | {"tools": self._plain(tools)}
        return [
            self._direct(compiled, given, seen, generates)
            if self._is_direct and seen
            else self._through(chosen, seen, tools, generates)
            for seen, generates in cases
        ]

    def _compiled(self, template: str) -> tuple[Any, dict[str, Any]]:
        """With the names that it knows beside those of the conversation."""
        compiled = self._compile(template)
        compiled.globals["strftime_now"] = self._strftime
        compiled.environment.getattr = partial(_attribute, compiled.environment)
        own = {**self._tokenizer.special_tokens_map, **self._arguments}
        return compiled, {**compiled.globals, **self._plain(own), "documents": None}

    def _direct(self, compiled: Any, names: dict[str, Any], seen: Sequence[Message], generates: bool) -> str:
        given = {**names, "messages": list(seen), "add_generation_prompt": generates}
        environment = compiled.environment
        context = environment.context_class(environment, given, compiled.name, compiled.blocks)
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
    """As the sandbox finds it, without the exception that the name of a field is no attribute of dicts."""
    if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
        return obj[attribute]
    return type(environment).getattr(environment, obj, attribute)


@lru_cache(1)
def _statm(pid: int) -> int:
    """The open file with the sizes of this process; to open it takes longer than to render a short row."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _limited(render: Callable[[], list[str]]) -> list[str]:
    """Raises MemoryError if the process takes ``_MOST_BYTES`` more; only on Linux. And TimeoutError, as ``_timed``."""
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
    """Raises TimeoutError if it takes longer than ``_MOST_SECONDS``; only in a main thread."""

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
