"""Only regular files of text are read, as far as their limit, and never waited for; JSON within limits."""

import os
import socket
from pathlib import Path

import pytest

from passes.errors import PlanError
from planner.files.text import KIB, is_directory, is_file, parse_json, printable, read_json, read_text, shorten
from tests.tools.mutations import at_most


def error(path: object) -> str:
    with pytest.raises(PlanError) as caught, at_most(10):
        read_text(path, "list", most_bytes=KIB, fix="do this")  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def test_text_comes_without_a_byte_order_mark(tmp_path):
    (tmp_path / "it").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(tmp_path / "it", "list", most_bytes=KIB) == "a\r\nb"
    (tmp_path / "it").write_bytes(b"x" * KIB)
    assert len(read_text(tmp_path / "it", "list", most_bytes=KIB)) == KIB


def test_what_is_no_regular_file_is_named_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, not a regular file" in error(tmp_path / "pipe")
    assert "is a directory, not a regular file" in error(tmp_path)
    for device in ("/dev/full", "/dev/zero", "/dev/null"):
        if Path(device).exists():
            assert "is a device, not a regular file" in error(device)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        assert "cannot read the list" in error(tmp_path / "socket")


def test_what_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * (KIB + 1))
    (tmp_path / "utf16").write_bytes("a\nb".encode("utf-16"))
    (tmp_path / "loop").symlink_to("loop")
    assert f"the list {tmp_path / 'large'} is larger than 1 KiB" in error(tmp_path / "large")
    assert "the list is not UTF-8 text\n  at:  utf16:1" in error(tmp_path / "utf16")
    assert "Too many levels" in error(tmp_path / "loop")
    assert "there is no list file" in error(tmp_path / "none")
    assert "Not a directory" in error(tmp_path / "large" / "in")
    assert "File name too long" in error("n" * 5000)
    assert len(error("n" * 5000)) < 2000
    assert "null byte" in error("a\0b")
    assert "its name is not UTF-8" in error("\ud800")


def test_a_name_that_no_file_can_have_is_none(tmp_path):
    for name in ("n" * 5000, "a\0b", "\ud800", "no such"):
        assert not is_file(Path(name))
        assert not is_directory(Path(name))
    assert is_directory(tmp_path)


def test_words_of_an_error_are_short_and_move_no_cursor():
    assert shorten("a" * 1000, 9) == "aaaaaa…aaa"
    assert printable("a\x1b[31m\u202eb\né\0") == "a\\x1b[31m\\u202eb\né\\x00"


# ---- jSON within limits: what is too deep, too large, not a number or given twice is one error with its reason


def test_plain_values_are_read():
    text = '{"a": [1, -2, 2.5, 1e3, true, null, "é"], "b": {}}'
    assert parse_json(text) == {"a": [1, -2, 2.5, 1e3, True, None, "é"], "b": {}}
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json(r'"\ud835\udd4f"') == "\U0001d54f"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[1", "Expecting"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 400, "the number 9{26}…9{14} is too large"),
        ("9" * 5000, "is too large"),
        ("-9223372036854775809", "is too large"),
        ("1e999", "is too large"),
        ("NaN", "NaN is no JSON"),
        ("[-Infinity]", "-Infinity is no JSON"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice"),
        ('"\\ud800"', "half a character"),
        ('{"\\udfff": 1}', "half a character"),
        ('"\x00"', "Invalid control character"),
    ],
    ids=lambda value: value[:12].replace("\x00", "0"),
)
def test_what_is_no_plain_value_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_a_file_that_is_no_json_is_one_plan_error(tmp_path):
    path = tmp_path / "it.json"
    path.write_text('{"a": ')
    with pytest.raises(PlanError, match="the index is damaged or truncated: Expecting value") as caught:
        read_json(path, "index", fix="give one", damaged="save it again")
    assert (caught.value.where, caught.value.fix) == (str(path), "save it again")
    path.write_text("[1]")
    with pytest.raises(PlanError, match="is larger than 0 KiB"):
        read_json(path, "index", most_bytes=2)
