"""A model's tokenizer with its chat template: the text and the tokens of generation."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from passes.errors import PlanError, first_line, imported
from planner.files.text import MIB, is_directory, is_file, read_text, shorten
from runtime.data.instruction.conversation import Message
from runtime.data.instruction.template import Case, ChatTemplate
from runtime.data.text.encoders import end_ids

Border = tuple[str, str]  # the characters before and after it
Key = TypeVar("Key", str, Border)
Value = TypeVar("Value")
_DIRECTORY = "give the model's directory, with tokenizer_config.json and chat_template.jinja"
_NEAR, _FIRST_WORD = 24, re.compile(r"\s*\S*\s*")  # characters beside a border: few, so that rows share cache entries
_KEPT, _BORDERS = MIB, 1 << 16  # limits of the caches: characters of texts, number of border characters
_PREFIXED = {"ByteLevel": {"add_prefix_space": False}, "Metaspace": {"prepend_scheme": "never"}}


class ChatTokenizer:
    """The tokenizer of a directory, with its chat template.

    ``template``: a file, or the name of one of the tokenizer's templates; None: its default. ``date``: None for today.
    ``ends``: the ids that end an answer, from generation config and tokenizer. ``marker``: matches any special token.
    ``encoded``: part of a template's text -> ids. ``answers``: text -> ids as it continues another text, without a
    space in front. ``crossed``: border -> whether a token would contain characters of both sides.

    Raises PlanError for a directory without a tokenizer of the library `tokenizers`.
    """

    def __init__(
        self,
        path: str,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        self.path, self.day = Path(path), _day(date)
        self.tokenizer = _loaded(self.path)
        self._fast = self.tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._bare = _without_prefix(self._fast)
        added = self.tokenizer.added_tokens_decoder
        self.special = {token.content: i for i, token in added.items() if token.special and token.content}
        # no token crosses a special one: the text between two is tokenized separately, once for all turns
        cut = [token for token in added.values() if token.special and token.content]
        self._is_cut = not any(token.lstrip or token.single_word or token.normalized for token in cut)
        self.encoded, self.answers = _Kept(partial(_ids, self._fast)), _Kept(partial(_ids, self._bare))
        self.crossed = _Kept(self._cross, _BORDERS)
        self.special |= dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        self.marker = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or r"(?!)")
        self.eos: int | None = self.tokenizer.eos_token_id
        of_eos = [] if self.eos is None else [self.eos]
        self.config_ends = tuple(end_ids(self.path))
        self.ends: tuple[int, ...] = tuple(dict.fromkeys([*self.config_ends, *of_eos]))
        self.template = None if template is None else self._named(template)
        day = {} if date is None else {"date_string": self.day.strftime("%d %b %Y")}
        self.rendering = ChatTemplate(self.tokenizer, self.template, day | dict(arguments or {}), self.day.strftime)
        self.seen = self.rendering.seen

    @property
    def vocabulary_size(self) -> int:
        return max(self.tokenizer.get_vocab().values(), default=0) + 1

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, generates: bool = False) -> str:
        """Return the template's text of a conversation. Raises RowError if the template fails."""
        return self.render_seen([([self.seen(message) for message in messages], generates)], tools)[0]

    def render_seen(self, cases: Sequence[Case], tools: list[Any] | None) -> list[str]:
        """Return the text of each case, of messages that ``seen`` returned. Raises RowError.

        Raises PlanError if the tokenizer has no template.
        """
        if self.template is None and not self.tokenizer.chat_template:
            what = f"{shorten(self.path)} has no chat template"
            raise PlanError(what, where="--tokenizer", fix=f"add --chat-template FILE, or {_DIRECTORY}")
        return self.rendering.render(cases, tools)

    def cut(self, text: str) -> list[str]:
        """Return the parts of a template's text that are tokenized separately."""
        if not self._is_cut:
            return [text]
        begins = [0, *(token.start() for token in self.marker.finditer(text, 1)), len(text)]
        return [text[begin:end] for begin, end in pairwise(begins)]

    def ids(self, parts: Iterable[str]) -> list[int]:
        """Return the ids of a template's text, given its parts, as generation tokenizes it."""
        return list(chain.from_iterable(map(self.encoded.of, parts)))

    def begun_ids(self, text: str) -> list[int]:
        """Return ids with the tokenizer's own special tokens, as generation tokenizes a prompt without a template."""
        return self._fast.encode(text, add_special_tokens=True).ids

    def border(self, before: str, answer: str) -> Border:
        """Return the characters beside a border that determine whether a token would cross it."""
        begin, near = _FIRST_WORD.match(answer, 0, _NEAR), before[-4 * _NEAR :]
        if not self._is_cut:
            near = near[max((token.start() for token in self.marker.finditer(near)), default=0) :]
        return near[-_NEAR:], begin[0] if begin else ""

    def _cross(self, borders: Sequence[Border]) -> Iterator[bool]:
        joined = self._fast.encode_batch([head + begin for head, begin in borders], add_special_tokens=False)
        for (head, begin), encoding in zip(borders, joined, strict=True):
            last = encoding.char_to_token(len(head) - 1) if head and begin else None
            yield last is not None and last == encoding.char_to_token(len(head))

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _named(self, template: str) -> str:
        """Return the text or the name of a template. Raises PlanError if there is none."""
        own = self.tokenizer.chat_template
        if is_file(Path(template)):
            return read_text(template, "chat template", most_bytes=MIB, fix=_DIRECTORY)
        if isinstance(own, dict) and template in own:
            return template
        named = f"; the tokenizer has {', '.join(own)}" if isinstance(own, dict) else ""
        fix = "give a file, or the name of a template of the tokenizer"
        raise PlanError(f"no chat template {shorten(template)}{named}", where="--chat-template", fix=fix)


def _day(text: str | None) -> datetime:
    try:
        day = date.today() if text is None else date.fromisoformat(text)
    except ValueError:
        raise PlanError(f"--date {shorten(text)} is no day", where="--date", fix="write 2025-12-31") from None
    return datetime.combine(day, datetime.min.time())


def _loaded(path: Path) -> Any:
    if not is_directory(path):
        what = f"{shorten(path)} is no directory of a tokenizer: a tokenizer.json alone has no template"
        raise PlanError(what, where="--tokenizer", fix=_DIRECTORY)
    fix = "pip install 'meshwright[data]'"
    library = imported("transformers", "a tokenizer with a template", where="--tokenizer", fix=fix)
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # panics of the library are not an Exception
        what = f"{shorten(path)} has no tokenizer that transformers loads: {shorten(first_line(error))}"
        raise PlanError(what, where="--tokenizer", fix=_DIRECTORY) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        what = f"the tokenizer {type(tokenizer).__name__} of {shorten(path)} is not of the library `tokenizers`"
        raise PlanError(what, where="--tokenizer", fix="convert it to a tokenizer.json")
    return tokenizer


def _without_prefix(tokenizer: Any) -> Any:
    """Return a copy of the tokenizer that puts no space in front of a text."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.to_str())
    for key in ("normalizer", "pre_tokenizer"):
        content[key] = _bare(content.get(key))
    return Tokenizer.from_str(json.dumps(content))


def _bare(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") == "Prepend":
        return None
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        return part | {key: [kept for each in part[key] if (kept := _bare(each)) is not None]}
    return part | _PREFIXED.get(part["type"], {})


def _ids(tokenizer: Any, texts: Sequence[str]) -> Iterator[list[int]]:
    """Return the ids of each text, without tracking offsets."""
    return (encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))


class _Kept(Generic[Key, Value]):
    """A cache of values by text, made in batches; emptied when its texts exceed ``most`` characters."""

    def __init__(self, make: Callable[[list[Key]], Iterable[Value]], most: int = _KEPT) -> None:
        self._make, self._most, self._values, self._size = make, most, dict[Key, Value](), 0

    def of(self, key: Key) -> Value:
        if key not in self._values:
            self.fill([key])
        return self._values[key]

    def fill(self, keys: Iterable[Key]) -> None:
        """Make the missing values of ``keys`` in one call."""
        if self._size > self._most:
            self._values, self._size = {}, 0
        if new := list(set(keys).difference(self._values)):
            self._values.update(zip(new, self._make(new), strict=True))
            self._size += sum(map(len, new))
