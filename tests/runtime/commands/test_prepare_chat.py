"""The command prepare on conversations: samples with labels, in a file of its own version, and rows that are bad."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from passes.errors import PlanError
from runtime.cli import app
from runtime.data.instruction.chat_tokenizer import ChatTokenizer
from runtime.data.reading import read_tokens
from runtime.data.token_file import check_content, files_in, read_header
from runtime.data.tokens import LABEL, ROW
from tests.tools.chat_tokenizers import chat_directory, talk
from tests.tools.paths import ROOT
from tests.tools.texts import bpe_file

pytest.importorskip("transformers")


def prepare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def error_of(result: Result) -> str:
    assert result.exit_code != 0
    return str(result.exception) if isinstance(result.exception, PlanError) else result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_directory(tmp_path_factory.mktemp("model") / "model", "thinks")


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_samples_have_a_bit_a_label_and_the_tokenizer_goes_with_them(model: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "c.jsonl", {"messages": talk("hi", "yes", "and?", "no")}, {"messages": talk("a", "b")})
    out = tmp_path / "out"
    result = prepare(rows, "-o", out, "--tokenizer", model, "--chat", "messages", "--date", "2025-01-02")
    assert result.exit_code == 0, result.output
    for words in (
        "3 samples",
        "2 rows of the format openai (detected)",
        "the date 2025-01-02",
        "is not in generation_config",
    ):
        assert words in result.output
    assert "1 rows are one sample a turn" in result.output
    tokens = read_tokens(str(out))
    check_content(out)
    assert struct.unpack_from("<I", out.read_bytes(), 8) == (2,)
    assert tokens.is_supervised
    starts = [0, *tokens.ends[:-1].tolist()]
    assert [bool(tokens.marks[start] & ROW) for start in starts] == [True, False, True]
    labels = (np.asarray(tokens.marks) & LABEL) != 0
    assert tokens.words.tolist() == [int(labels[a:b].sum()) for a, b in zip(starts, tokens.ends.tolist(), strict=True)]
    files = files_in(out)
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= files.keys()
    assert files["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    end = int(tokens.ids[tokens.ends[0] - 1])
    assert end in json.loads(files["generation_config.json"])["eos_token_id"]


def test_it_shows_the_parts_that_are_labels(model: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "c.jsonl", {"messages": talk("hi", "yes", "and?", "no")}, {"messages": talk("a", "b")})
    base = [rows, "-o", tmp_path / "out", "--tokenizer", model, "--chat", "messages", "--show", "2"]
    found = [json.loads(line) for line in prepare(*base, "--json").output.splitlines()]
    assert [(each["row"], each["turn"]) for each in found] == [(0, 0), (0, 1)]
    assert [each["supervised"] for each in found] == [
        ["<think>\n\n</think>\n\nyes<|im_end|>"],
        ["<think>\n\n</think>\n\nno<|im_end|>"],
    ]
    assert found[0]["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + found[0]["supervised"][0]
    assert "⟦<think>\n\n</think>\n\nno<|im_end|>⟧" in prepare(*base).output


def test_prompts_and_answers_need_no_template(tmp_path: Path) -> None:
    model = chat_directory(tmp_path / "model", None, "gpt2")
    rows = written(tmp_path / "c.jsonl", {"q": "the cat", "a": " sat"}, {"q": "2+2=", "a": "4"})
    base = [rows, "-o", tmp_path / "out", "--tokenizer", model, "--prompt", "q", "--answer", "a"]
    base += ["--show", "2", "--json"]
    found = [json.loads(line) for line in prepare(*base).output.splitlines()]
    assert [each["supervised"] for each in found] == [[" sat<|endoftext|>"], ["4<|endoftext|>"]]
    assert found[1]["text"] == "2+2=4<|endoftext|>"
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = [json.loads(line) for line in prepare(*base, "--chat-template", tmp_path / "own.jinja").output.splitlines()]
    assert found[1]["text"] == "<|user|>2+2=<|end|><|assistant|>4<|end|>"
    assert files_in(tmp_path / "out")["chat_template.jinja"] == (tmp_path / "own.jinja").read_bytes()


def test_texts_of_a_field_are_documents_that_may_begin_with_the_tokenizers_token(tmp_path: Path) -> None:
    rows = written(tmp_path / "c.jsonl", {"body": "a b"}, {"body": "c"})
    assert prepare(rows, "-o", tmp_path / "out", "--text", "body").exit_code == 0
    assert read_tokens(str(tmp_path / "out")).ids.tobytes() == b"a b\0c\0"
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer.from_file(str(bpe_file(tmp_path / "tokenizer.json")))
    own.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    own.save(str(tmp_path / "tokenizer.json"))
    base = [rows, "-o", tmp_path / "out", "--text", "body", "--tokenizer", tmp_path / "tokenizer.json"]
    for more, first in (([], None), (["--begin-token", "auto"], 0)):
        assert prepare(*base, *more).exit_code == 0
        tokens = read_tokens(str(tmp_path / "out"))
        assert not tokens.is_supervised
        assert (int(tokens.ids[0]) == 0) == (first == 0)
        assert (int(tokens.ids[tokens.ends[0]]) == 0) == (first == 0)


GOOD = {"messages": talk("a", "b")}
DEEP = {"function": {"name": "f", "arguments": json.loads('{"a":[' * 400 + "1" + "]}" * 400)}}


@pytest.mark.parametrize(
    ("rows", "words", "line"),
    [
        (["{"], "a row cannot be read", 2),
        (["[1]"], "a row is a list, not an object", 2),
        (["[" * 100_000], "a row cannot be read", 2),
        (['{"messages": "\\ud800"}'], "a row cannot be read", 2),
        ([{"messages": []}], "has no list of messages 'messages'", 2),
        ([{"messages": [{"role": "user", "content": "x"}]}], "has no message of the assistant to train on", 2),
        ([{"messages": [1]}], "message 0 is a int", 2),
        ([{"messages": talk("a", {"content": None})}], "has no text as content", 2),
        ([{"messages": talk("a", {"content": "", "tool_calls": [{}]})}], "a tool call has no name", 2),
        ([{"messages": talk("a", "b"), "tools": 3}], "tools is no list of objects", 2),
        ([{"messages": talk("a", "b<|im_start|>")}], "holds the special token", 2),
        ([{"messages": talk("\U000f0000", "b")}], "characters of private use", 2),
        ([{"messages": talk("a", {"content": 3})}], "has no text as content", 2),
        ([{"messages": talk("a", {"content": ["x"]})}], "a part of the kind str", 2),
        ([{"messages": [{"from": ["gpt"], "value": "a"}]}], "has the unknown role ['gpt']", 2),
        ([{"messages": [{"role": {}, "content": "a"}]}], "has the unknown role {}", 2),
        ([{"messages": "[" * 100_000}], "messages is a text that is not JSON", 2),
        ([{"messages": talk("a", "b"), "tools": "{"}], "tools is a text that is not JSON", 2),
        ([{"messages": talk("a", {"content": "b", "tool_calls": "f"})}], "a tool call has no name", 2),
        ([{"instruction": 1, "output": "x"}], "the row has no text 'instruction'", 2),
        ([{"instruction": "a", "input": [1], "output": "x"}], "the row has no text 'input'", 2),
        ([{"instruction": "a", "output": "x", "system": 7}], "the row has no text 'system'", 2),
        ([{"messages": talk("a", {"content": "b", "tool_calls": [DEEP]})}], "a row is nested too deeply", 2),
        (["\0"], "a row cannot be read", 2),
        (['{"messages": [{"role": "user"'], "a row cannot be read", 2),
    ],
)
def test_a_bad_row_is_one_error_with_file_and_line_or_left_out_and_counted(
    model: Path, tmp_path: Path, rows: list[Any], words: str, line: int
) -> None:
    path, out = written(tmp_path / "c.jsonl", GOOD, *rows, GOOD), tmp_path / "out"
    base = [path, "-o", out, "--tokenizer", model, "--chat", "messages"]
    error = error_of(prepare(*base))
    assert words in error
    assert f"c.jsonl:{line}" in error
    assert not out.exists()
    result = prepare(*base, "--bad-rows", "drop")
    assert result.exit_code == 0, result.output
    assert "2 samples" in result.output
    assert "1 rows that cannot be used, left out" in result.output


def test_the_first_bad_row_is_the_error_whenever_it_is_found(model: Path, tmp_path: Path) -> None:
    special = {"messages": talk("a", "b<|im_start|>")}  # which is found when its text is, later than a row without JSON
    path = written(tmp_path / "c.jsonl", GOOD, special, "{")
    base = [path, "-o", tmp_path / "out", "--tokenizer", model, "--chat", "messages"]
    error = error_of(prepare(*base))
    assert "holds the special token" in error
    assert "c.jsonl:2" in error
    result = prepare(*base, "--bad-rows", "drop")
    assert "2 rows that cannot be used, left out" in result.output
    assert "the first: message 1, content holds the special token" in result.output


def test_rows_beside_one_that_its_template_refuses_are_as_rows_alone(tmp_path: Path) -> None:
    model = chat_directory(tmp_path / "model", "raises")
    rows = [{"messages": talk("hi", "yes", system=system)} for system in (None, "s", None)]
    rows[2]["messages"] += talk("and?", "no")
    found = []
    for number, part in enumerate((rows, rows[:1], rows[2:])):
        path, out = written(tmp_path / "c.jsonl", *part), tmp_path / f"out{number}"
        base = [path, "-o", out, "--tokenizer", model, "--chat", "messages", "--bad-rows", "drop"]
        assert prepare(*base).exit_code == 0
        found.append(read_tokens(str(out)).ids.tolist())
    assert found[0] == found[1] + found[2]


def test_marks_of_byte_order_and_ends_of_lines_are_no_text(model: Path, tmp_path: Path) -> None:
    row = json.dumps(GOOD).encode()
    twice = b'{"messages": [], "messages": ' + json.dumps(GOOD["messages"]).encode() + b"}"
    found = []
    for number, content in enumerate((row + b"\n" + row, b"\xef\xbb\xbf" + row + b"\r\n\r\n" + twice)):
        (tmp_path / "c.jsonl").write_bytes(content)
        base = [tmp_path / "c.jsonl", "-o", tmp_path / f"out{number}", "--tokenizer", model, "--chat", "messages"]
        assert prepare(*base, "--date", "2025-01-02").exit_code == 0
        found.append(read_tokens(str(tmp_path / f"out{number}")).ids.tolist())
    assert found[0] == found[1]


def test_rows_without_an_answer_may_be_dropped_and_large_or_strange_texts_pass(model: Path, tmp_path: Path) -> None:
    large = "the cat sat " * 100_000
    rows = written(
        tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "x"}]}, "", {"messages": talk("a\0b", large)}
    )
    result = prepare(rows, "-o", tmp_path / "out", "--tokenizer", model, "--chat", "messages", "--unlabelled", "drop")
    assert result.exit_code == 0, result.output
    assert "1 rows without an answer to train on, left out" in result.output
    assert "1 samples" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat", "messages"], "answers need the model's tokenizer"),
        (["--chat", "messages", "--tokenizer", "tokenizer.json"], "a tokenizer.json alone has no template"),
        (["--chat", "messages", "--tokenizer", "bare"], "bare has no chat template"),
        (["--chat", "messages", "--tokenizer", "empty"], "has no tokenizer that transformers loads"),
        (["--chat", "messages", "--tokenizer", "bare", "--chat-template", "none"], "no chat template none"),
        (["--chat", "messages", "--tokenizer", "bare", "--date", "today"], "--date today is no day"),
        (["--chat", "messages", "--tokenizer", "bare", "--template-args", "x"], "is not NAME=VALUE"),
        (["--chat", "messages", "--tokenizer", "bare", "--end-token", "x"], "apply to texts"),
        (["--chat", "messages", "--text", "x"], "four kinds of rows"),
        (["--chosen", "a", "--rejected", "b", "--prompt", "p", "--answer", "c"], "four kinds of rows"),
        (["--prompt", "q"], "--prompt and --answer go together"),
        (["--train-on", "last"], "--train-on without --chat"),
        (["--show", "3"], "--show without --chat"),
        (["--chat", "x", "--tokenizer", "bare", "--json"], "--json applies to the samples of --show"),
    ],
)
def test_options_that_do_not_go_together_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("c.jsonl"), GOOD)
    chat_directory(Path("bare"), None)
    bpe_file(Path("tokenizer.json"))
    Path("empty").mkdir()
    assert words in error_of(prepare("c.jsonl", "-o", "out", *arguments))
    assert not Path("out").exists()


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_tables_are_read_as_lines_are(package: str, model: Path, tmp_path: Path) -> None:
    made = [{"messages": talk("a", "b")}, {"messages": talk("a", "b", "c", "d")}]
    if package == "pyarrow":
        table = pytest.importorskip("pyarrow").Table.from_pylist(made)
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "t.parquet")
    else:
        pytest.importorskip("datasets").Dataset.from_list(made).save_to_disk(str(tmp_path / "t.parquet"))
    lines = written(tmp_path / "c.jsonl", *made)
    for source, out in ((tmp_path / "t.parquet", "a"), (lines, "b")):
        result = prepare(
            source, "-o", tmp_path / out, "--tokenizer", model, "--chat", "messages", "--date", "2025-01-02"
        )
        assert result.exit_code == 0, result.output
    assert read_tokens(str(tmp_path / "a")).ids.tolist() == read_tokens(str(tmp_path / "b")).ids.tolist()


def test_a_table_whose_package_is_missing_or_that_is_broken_is_one_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 broken")
    error = error_of(
        prepare(tmp_path / "t.parquet", "-o", tmp_path / "out", "--tokenizer", model, "--chat", "messages")
    )
    assert "meshwright[data]" in error or "cannot be read" in error


# ---- Commands on the chat model of the examples


CHAT = ROOT / "examples" / "chat"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the samples, and a spec of one process."""
    made = tmp_path_factory.mktemp("chat")
    spec = yaml.safe_load((ROOT / "examples" / "sft.yaml").read_text())
    (made / "spec.yaml").write_text(yaml.safe_dump(spec | {"mesh": {}}))
    texts = [str(CHAT / "chat.jsonl"), "--tokenizer", str(CHAT), "--chat", "messages"]
    ran("prepare", *texts, "-o", str(made / "sft.tokens"))
    return made


def ran(*words: str) -> Any:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    return found


@pytest.mark.thorough
def test_evaluate_scores_the_labels_alone(directory: Path) -> None:
    data = directory / "sft.tokens"
    given = [f"hf:{CHAT}", str(directory / "spec.yaml"), "--data", str(data), "--format", "json"]
    found = json.loads(ran("evaluate", *given).stdout)
    assert (found["num_scored"], found["num_ignored"], found["counted"]) == (240, 0, "labels")
    assert read_header(data).tokens > 240


@pytest.mark.thorough
def test_a_conversation_is_answered_as_its_rendered_text_is_continued(directory: Path) -> None:
    turns = talk("What is one plus one?", "It is two.", "Is that even?")
    (directory / "talk.json").write_text(json.dumps(turns))
    text = ChatTokenizer(str(CHAT)).render(turns, None, generates=True)
    given = ["generate", f"hf:{CHAT}", str(directory / "spec.yaml"), "--max-new-tokens", "4", "--format", "json"]
    answered = json.loads(ran(*given, "--messages", str(directory / "talk.json")).stdout)
    assert answered[0]["prompt"] == text
    assert answered == json.loads(ran(*given, "--prompt", text, "--tokenizer", str(CHAT)).stdout)


@pytest.mark.thorough
def test_a_run_on_samples_shows_texts_by_the_tokenizer_of_its_token_file(directory: Path) -> None:
    given = ["--data", str(directory / "sft.tokens"), "--steps", "2", "--sample-every", "2", "--quiet"]
    found = ran("train", f"hf:{CHAT}", str(directory / "spec.yaml"), *given, "--sample-prompt", "What is")
    assert "step 2 continues: What is" in found.stderr
