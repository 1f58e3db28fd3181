"""What ``--data`` names: bytes of files, each a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from passes.errors import PlanError
from runtime.data.reading import read_tokens


def test_the_standard_library_is_a_text_of_its_own() -> None:
    tokens = read_tokens("stdlib")
    assert len(tokens.ids) > 1_000_000
    assert len(tokens.ends) > 100


def test_a_directory_is_read_in_sorted_order_each_file_a_document(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one of")
    (tmp_path / "empty").touch()
    tokens = read_tokens(str(tmp_path))
    assert tokens.ids.tobytes() == b"one of\0two\0"
    assert tokens.ends.tolist() == [7, 11]
    assert tokens.words.tolist() == [2, 1]


def test_identity_changes_with_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    first = read_tokens(str(tmp_path)).identity
    assert read_tokens(str(tmp_path)).identity == first
    (tmp_path / "a").write_text("two")
    assert read_tokens(str(tmp_path)).identity != first


def test_nothing_to_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(PlanError, match="the data is empty"):
        read_tokens(str(tmp_path / "empty"))
    with pytest.raises(PlanError, match="no file or directory no_such_file"):
        read_tokens("no_such_file")
