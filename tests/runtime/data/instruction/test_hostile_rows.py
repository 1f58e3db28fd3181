"""Rows that nobody would write: each becomes samples, or is one error with its place, or left out and counted."""

import json
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import pytest

from passes.errors import PlanError
from runtime.data.instruction import template
from runtime.data.instruction.conversation import conversation_of
from runtime.data.instruction.options import Instruction
from runtime.data.instruction.prepare import UNLABELLED, prepare_samples
from runtime.data.instruction.prepare import _Samples as Samples
from runtime.data.instruction.supervised import Rule
from runtime.data.text.documents import RowError, rows_of
from tests.tools.chat_tokenizers import TEMPLATES, chat_directory, samples_of, talk

pytest.importorskip("transformers")

NUM_ROWS = 1000
ODD = (
    "", " ", "\n\n", "\0", "a\0b", "\u200b", "\ufeff", "\U000f0000", "<|im_end|>", "<|im_start|>user\n", "{{ x }}",
    "<think>", "🙂" * 9, "\x1b[2J", "é\u0301", "x" * 5000, "1" * 5000, "\\ud800", "a\r\nb", "\u202eabc",
)  # fmt: skip
VALUES = (None, 0, -1, 1e999, 3.5, True, [], {}, [[]], [None], {"a": 1}, "text", [{"type": "image"}], "[1", "null")
ROLES = ("user", "assistant", "system", "tool", "", "User", "human", None, 3, [], "assistant\n")


def row_of(seed: int) -> str:
    """A conversation with one to three things wrong, or odd; or a line that is no row."""
    draw = Random(seed)
    messages: list[Any] = talk(
        *(draw.choice(("yes", "hi there, how are you?", *ODD)) for _ in range(draw.randint(1, 6)))
    )
    row: dict[str, Any] = {"messages": messages}
    for change in draw.choices(CHANGES, k=draw.randint(1, 3)):
        change(draw, row)
    line = json.dumps(row, ensure_ascii=draw.random() < 0.5)
    return draw.choice(LINES)(draw, line) if draw.random() < 0.2 else line


def _message(draw: Random, row: dict[str, Any]) -> dict[str, Any]:
    messages = row.get("messages")
    found = draw.choice(messages) if isinstance(messages, list) and messages else {}
    return found if isinstance(found, dict) else {}


def _nested(draw: Random) -> Any:
    depth, value = draw.choice((3, 50, 300)), draw.choice(ODD)
    return json.loads('{"a":[' * depth + json.dumps(value) + "]}" * depth)


def _call(draw: Random) -> Any:
    function = {"name": draw.choice(("f", "", 3, *ODD)), "arguments": draw.choice((*VALUES, _nested(draw)))}
    return draw.choice(({"type": "function", "function": function}, function, *VALUES))


CHANGES: Any = [
    lambda draw, row: _message(draw, row).update(content=draw.choice((*VALUES, *ODD))),
    lambda draw, row: _message(draw, row).update(role=draw.choice(ROLES)),
    lambda draw, row: _message(draw, row).pop(draw.choice(("role", "content")), None),
    lambda draw, row: _message(draw, row).update(tool_calls=draw.choice((*VALUES, [_call(draw)], [_call(draw)] * 3))),
    lambda draw, row: _message(draw, row).update(reasoning_content=draw.choice((*VALUES, *ODD))),
    lambda draw, row: _message(draw, row).update({draw.choice(("train", "weight")): draw.choice(VALUES)}),
    lambda draw, row: _message(draw, row).update({draw.choice(("from", "value", "name")): draw.choice(VALUES)}),
    lambda draw, row: row.update(messages=deepcopy(draw.choice(VALUES))),  # later changes are made in it
    lambda draw, row: row.update(tools=draw.choice((*VALUES, _nested(draw), [{"function": draw.choice(VALUES)}]))),
    lambda draw, row: row.update(more=_nested(draw)),
    lambda draw, row: row.update(messages=talk(*["again"] * draw.choice((1, 2, 9, 40)))),
]  # fmt: skip
LINES: Any = [
    lambda draw, line: line[: draw.randrange(len(line))],
    lambda draw, line: "[" * draw.choice((1, 200_000)),
    lambda draw, line: line.replace('"', "'"),
    lambda draw, line: line[: draw.randrange(len(line))] + "\0" + line,
    lambda draw, line: f"[{line}]",
    lambda draw, line: line.replace("{", '{"messages": 7, ', 1),
    lambda draw, line: line.replace("{", '{"n": ' + "9" * 5000 + ", ", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    made = (row_of(seed).encode(errors="surrogatepass").replace(b"\n", b" ") or b"-" for seed in range(NUM_ROWS))
    path.write_bytes(b"".join(line + b"\n" for line in made))
    return path


def check(error: PlanError, place: str) -> None:
    assert isinstance(error, RowError)
    assert str(error.where).rpartition("/")[2] == place
    assert error.fix
    assert len(str(error)) < 2000


def outcomes(path: Path, model: Path) -> Iterator[str]:
    """Of each row: "samples", or the words of its error."""
    made = Samples(str(model), Instruction(chat="messages", date="2025-01-02"))
    for number, row in enumerate(rows_of([path], None, lambda num_bytes: None)):
        try:
            (found,) = made.of([made.begin(row)])
        except PlanError as error:
            check(error, f"rows.jsonl:{number + 1}")
            yield error.what
            continue
        assert found
        for sample in found:
            assert all(0 < start < stop <= len(sample.ids) for start, stop in sample.answers)
        yield "samples"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["chatml", "thinks"])
def test_each_row_is_used_or_one_error_with_its_place(rows: Path, tmp_path: Path, name: str) -> None:
    model = chat_directory(tmp_path / "model", name)
    found = Counter(outcomes(rows, model))
    assert found.total() == NUM_ROWS
    assert NUM_ROWS // 10 < found["samples"] < NUM_ROWS * 9 // 10
    asked = Instruction(chat="messages", date="2025-01-02", bad_rows="drop", unlabelled="drop")
    header, told = prepare_samples([rows], tmp_path / "out", str(model), asked)
    left_out = sum(int(line.split()[0].replace(",", "")) for line in told if "left out" in line and "rows" in line)
    assert left_out == NUM_ROWS - found["samples"]
    assert header.documents >= found["samples"]
    assert any(line.endswith(UNLABELLED) for line in told)


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["the cat sat ", "x", " ", "a\n", "\n", "你好", "7", ".", "\0", "🙂"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_long_field_takes_time_by_its_length(tmp_path: Path, text: str, place: int) -> None:
    rule, seconds = Rule(Samples(str(chat_directory(tmp_path / "model", "chatml")), Instruction(chat="m")).chat), []
    for size in (100_000, 1_000_000):
        long = "a" + text * (size // len(text)) + "b"
        row = {"m": talk(*((long, "it is so, and not else")[:: 1 - 2 * place]))}
        begun = process_time()
        (sample,) = samples_of(conversation_of(row, "m", None, "all"), rule)
        seconds.append(process_time() - begun)
        assert len(sample.ids) > 10
    assert seconds[1] < 40 * seconds[0]  # the square would be 100


LARGE = "the cat sat " * 850_000  # 10 MB
CALLED = {"type": "function", "function": {"name": "f", "arguments": {"city": LARGE}}}
LARGE_ROWS: dict[str, Any] = {
    "samples": {"messages": talk(LARGE, LARGE)},
    "message 0 has the unknown role": {"messages": [{"role": LARGE, "content": "a"}, *talk("a", "b")]},
    "has no list of messages": {LARGE: 1},
    "messages is a text that is not JSON": {"messages": "[" * len(LARGE)},
    "a row cannot be read": '{"messages": [{"role": "user", "content": "' + LARGE,
    "message 1: the template drops tool_calls": {"messages": talk("a", {"content": "", "tool_calls": [CALLED]})},
    "100,000 messages and 50,000 answers": {"messages": talk(*["a"] * 100_000)},
}


@pytest.mark.thorough
def test_a_field_of_ten_megabytes_is_a_sample_or_one_short_error(tmp_path: Path) -> None:
    model, rows = chat_directory(tmp_path / "model", "chatml"), tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in LARGE_ROWS.values())
    for wanted, told in zip(LARGE_ROWS, outcomes(rows, model), strict=True):
        assert wanted in told


BAD_TEMPLATES = {
    "{{ raise_exception('no ' + messages[0].role) }}": "TemplateError: no user",
    "{{ 'x' * 999999999 }}": "more than 512 MiB",
    "{{ messages | map('upper', 'x') | join }}": "the chat template fails",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "longer than",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "the chat template fails: RecursionError",
    "{{ messages.append(1) }}": "the chat template fails: SecurityError",
    "{{ messages[0].content.__class__.__mro__ }}": "the chat template fails",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{% if %}": "the chat template fails: TemplateSyntaxError",
    "": "",
    "{{ messages[99].content }}": "the chat template fails: UndefinedError",
}


@pytest.mark.parametrize("text", BAD_TEMPLATES)
def test_a_bad_template_is_one_error_at_the_first_row(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "_MOST_SECONDS", 0.3)
    model = chat_directory(tmp_path / "model", "chatml")
    (tmp_path / "bad.jinja").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk("hi", "yes")}) + "\n")
    asked = Instruction(chat="messages", chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(RowError) as error:
        prepare_samples([tmp_path / "rows.jsonl"], tmp_path / "out", str(model), asked)
    assert BAD_TEMPLATES[text] in error.value.what
    assert str(error.value.where).endswith("rows.jsonl:1")
    assert not (tmp_path / "out").exists()


def test_a_template_sees_of_a_message_what_transformers_shows_it(tmp_path: Path) -> None:
    """Rendering through the compiled template is rendering by `apply_chat_template`."""
    chat = Samples(str(chat_directory(tmp_path / "model", "thinks")), Instruction(chat="m", date="2025-01-02")).chat
    assert chat.rendering._is_direct
    through = ("moves_system", "thinks", "channels")
    for text in (TEMPLATES[name] for name in through):
        chat.tokenizer.chat_template = text
        rendering = template.ChatTemplate(chat.tokenizer, None, {"enable_thinking": False}, chat.day.strftime)
        turns = talk("a", {"content": None, "reasoning": "b", "tool_calls": []}, "c", system="s")
        direct = rendering.render([([rendering.seen(turn) for turn in turns], True)], None)
        rendering._is_direct = False
        assert direct == rendering.render([(turns, True)], None)


def test_fields_are_found_as_the_sandbox_finds_them() -> None:
    environment = pytest.importorskip("jinja2.sandbox").ImmutableSandboxedEnvironment()
    values: list[Any] = [{"role": 1, "items": 2, "__class__": 3, "": 4}, {}, [1], "a", None]
    for value in values:
        for name in ("role", "items", "__class__", "__len__", "pop", "upper", "append", "none", ""):
            assert template._attribute(environment, value, name) == environment.getattr(value, name)
