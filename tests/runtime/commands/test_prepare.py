"""The command prepare: what it makes of texts, what it says, and that bad input ends in one error and no file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from passes.errors import PlanError
from runtime.cli import app
from runtime.data.reading import read_tokens
from tests.tools.commands import python
from tests.tools.limits import HANG_SECONDS
from tests.tools.texts import bpe_file


def prepare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat.\nthe dog sat.\n\na cat\n")
    return path


def test_it_writes_what_reading_the_text_would_give(text: Path, tmp_path: Path) -> None:
    result = prepare(text, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    made, read = read_tokens(str(tmp_path / "out")), read_tokens(str(text))
    for name in ("ids", "marks", "ends", "words"):
        assert getattr(made, name).tolist() == getattr(read, name).tolist()
    assert "1 documents, 34 tokens, 8 words (4.25 tokens a word), from 33 bytes of text" in result.output
    assert "tokenizer bytes: vocabulary 256, ids as uint8" in result.output


def test_a_tokenizer_and_a_split_are_taken(text: Path, tmp_path: Path) -> None:
    tokenizer = bpe_file(tmp_path / "tokenizer.json")
    result = prepare(text, "-o", tmp_path / "out", "--tokenizer", tokenizer, "--split-documents", "blank-line")
    assert result.exit_code == 0, result.output
    made = read_tokens(str(tmp_path / "out"))
    assert made.words.tolist() == [6, 2]
    assert made.tokenization.name == "tokenizer.json"
    assert made.ids[made.ends - 1].tolist() == [made.tokenization.special["end"]] * 2


def test_a_field_of_json_lines_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"body": "a b"}\n{"body": "c"}\n')
    result = prepare(tmp_path / "lines", "-o", tmp_path / "out", "--split-documents", "json", "--field", "body")
    assert result.exit_code == 0, result.output
    assert read_tokens(str(tmp_path / "out")).ids.tobytes() == b"a b\0c\0"


def test_many_texts_make_one_file(text: Path, tmp_path: Path) -> None:
    assert prepare(text, text, "-o", tmp_path / "out").exit_code == 0
    assert len(read_tokens(str(tmp_path / "out")).ends) == 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text.txt", "-o", "text.txt"], "is one of the texts and would be overwritten"),
        ([".", "-o", "text.txt"], "is one of the texts and would be overwritten"),
        (["none.txt", "-o", "out"], "no file or directory none.txt"),
        (["empty", "-o", "out"], "the text is empty"),
        (["text.txt", "-o", "."], "it is a directory"),
        (["text.txt", "-o", "none/out"], "is not a writable directory"),
        (["text.txt", "-o", "out", "--tokenizer", "text.txt"], "text.txt is not a valid tokenizer"),
        (["text.txt", "-o", "out", "--tokenizer", "none.json"], "there is no tokenizer file none.json"),
        (["latin", "-o", "out", "--tokenizer", "tokenizer.json"], "latin is not UTF-8"),
        (["zeros", "-o", "out"], "zeros contains the byte 0, which cannot occur in text"),
        (["tokens", "-o", "out"], "tokens is already a token file"),
        (["text.txt", "-o", "out", "--split-documents", "json"], "a row cannot be read"),
        (["text.txt", "-o", "out", "--field", "body"], "--field applies only to JSON"),
        (["text.txt", "-o", "out", "--bucket", "9" * 5000], "not a list of ascending lengths"),
        (["text.txt", "-o", "out", "--bucket", "9" * 20], "not a list of ascending lengths"),
        (["text.txt", "-o", "out", "--end-token", "x"], "without one, the byte 0 ends a document"),
        (["text.txt", "-o", "out", "--tokenizer", "tokenizer.json", "--end-token", "none"], "has no token 'none'"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    bpe_file(Path("tokenizer.json"))
    Path("empty").touch()
    Path("latin").write_bytes(b"s\xe9t")
    Path("zeros").write_bytes(b"one\0two")
    prepare(text, "-o", "tokens")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if arguments[0] == ".":
        Path("tokens").unlink()
        before.pop("tokens")
    result = prepare(*arguments)
    assert result.exit_code != 0
    error = str(result.exception) if isinstance(result.exception, PlanError) else result.output
    assert words in error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


PEAK = """
import resource, sys
from runtime.cli import app
try: app(["prepare", *sys.argv[1:]])
finally: print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def peak_mib(text: Path, out: Path) -> int:
    return int(python("-c", PEAK, text, "-o", out).stdout.rpartition("peak ")[2])


@pytest.mark.thorough
@pytest.mark.slow
def test_ctrl_c_leaves_nothing_and_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """A text of 96 MiB, of which each array of tokens would take as much, beside one of 4; then Ctrl-C."""
    small, large, out = tmp_path / "small", tmp_path / "large", tmp_path / "out"
    small.write_bytes(b"the cat sat on the mat. " * ((4 << 20) // 24))
    large.write_bytes(small.read_bytes() * 24)
    assert peak_mib(large, out) < peak_mib(small, out) + 32
    out.unlink()
    command = [sys.executable, "-m", "runtime.cli", "prepare", str(large), "-o", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what was started in the background
    broken = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(broken.pid, signal.SIGINT)
    assert broken.wait(HANG_SECONDS) != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]
