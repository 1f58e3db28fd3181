"""JSON within limits: what is too deep, too large, not a number or given twice is one error with its reason."""

from __future__ import annotations

import pytest

from passes.errors import PlanError
from planner.files.text import parse_json, read_json


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
