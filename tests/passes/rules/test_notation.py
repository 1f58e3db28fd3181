"""The notation of rules: its errors, and how words become factors."""

from __future__ import annotations

import re

import pytest

from passes.rules.notation import parse
from passes.rules.rule import Role


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("b s h, o h", 'has not one "->"'),
        ("b -> b -> b", 'has not one "->"'),
        ("b h+ -> b h", '"h+" is summed over and stands in the result'),
        ("b s h -> b s", '"h" is not in the result: mark it "h+" (summed over) or "h^" (mixed)'),
        ("b b -> b", '"b" stands twice in "b b"'),
        ("b h+, h^ -> b", '"h" is marked in two ways'),
        ("b h* -> b", '"h*" is no word of letters'),
        ("b h++ -> b", '"h++" is no word of letters'),
    ],
)
def test_a_text_that_does_not_parse_names_the_word(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse(text)


def test_a_mark_holds_for_every_place_of_its_word() -> None:
    pattern = parse("... i+, o i -> ... o")
    assert pattern.roles == {"i": Role.SUM, "o": Role.EACH}
    assert pattern.operands == (("...", "i"), ("o", "i"))
