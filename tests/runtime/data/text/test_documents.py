"""What ends a document, and what a file may not be."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from runtime.data.text import documents
from runtime.data.text.documents import Split, parts
from tests.tools.examples import examples


def found(path: Path, split: Split, field: str = "text") -> list[bytes]:
    """The documents, their parts put together."""
    result, whole = [], b""
    for part in parts([path], split, field):
        whole += part.content
        if part.closes:
            result.append(whole)
            whole = b""
    assert whole == b""
    return result


@pytest.mark.parametrize(
    ("split", "text", "wanted"),
    [
        (Split.file, "a\n\nb\n", ["a\n\nb\n"]),
        (Split.file, "\ufeffa", ["a"]),
        (Split.file, "", []),
        (Split.line, "a b\r\n\n  \nc", ["a b", "c"]),
        (Split.blank_line, "\n\na\nb\n \n\nc\n\n", ["a\nb\n", "c\n"]),
        (Split.json, '{"text": "a\\nb"}\n\n{"text": " ", "more": 1}\n{"text": "é"}', ["a\nb", "é"]),
    ],
)
def test_documents_end_where_the_split_says(tmp_path: Path, split: Split, text: str, wanted: list[str]) -> None:
    (tmp_path / "text").write_text(text, newline="")
    assert [document.decode() for document in found(tmp_path / "text", split)] == wanted


@examples(50)
@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 9))
def test_documents_in_parts_are_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "text"
    path.write_text(text)
    for split in (Split.file, Split.blank_line):
        whole = found(path, split)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "PART_BYTES", size)
            assert found(path, split) == whole
            for part in parts([path], split, ""):
                assert path.read_bytes()[part.offset :].startswith(part.content)


def test_all_bytes_are_told_as_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\nb\n\nc")
    for split in (Split.file, Split.line, Split.blank_line):
        told: list[int] = []
        list(parts([tmp_path / "text"], split, "", told.append))
        assert sum(told) == 6


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match="a pipe, not a regular file"):
        list(parts([tmp_path / "pipe"], Split.file, ""))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('"text"', "a row is a str, not an object"),
        ('{"body": "a", "id": 1}', r"has no text 'text' \(there is: body, id\)"),
        ('{"text": 1}', "has no text 'text'"),
        ('{"text": "\\ud800"}', "a row cannot be read"),
        ("\\xff", "cannot be read"),
    ],
)
def test_a_line_that_is_no_json_of_a_text_is_told_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"text": "good"}\n' + (b"\xff" if line == "\\xff" else line.encode()))
    with pytest.raises(PlanError, match=words) as error:
        found(path, Split.json)
    assert str(error.value.where).endswith("lines:2")


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_LINE_BYTES", 10)
    (tmp_path / "text").write_text("short\n" + "long" * 10)
    with pytest.raises(PlanError, match="is longer than") as error:
        found(tmp_path / "text", Split.line)
    assert str(error.value.where).endswith("text:2")
