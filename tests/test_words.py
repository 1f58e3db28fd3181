"""tests/tools/words.py: which strings of a file are messages, and which phrases it finds in them."""

import pytest

from tests.tools.words import (
    HOUSES,
    banned_in,
    broken_rates,
    checked_folder,
    checked_house,
    comments,
    counted,
    docstrings,
    folders,
    messages,
    prose,
)

SOURCE = '''"""What a module is told."""

def check(size):
    """Who calls it."""
    if size < 0:
        raise ValueError(
            f"the size {size} is wrong: "
            f"{size!r} is told"
        )
    return {"key": "one two", "help": "the size of a rank"}
'''


def test_a_message_is_a_string_of_three_words_that_is_no_docstring():
    assert messages(SOURCE) == [(7, "the size … is wrong: … is told"), (10, "the size of a rank")]
    assert [text for _, text in docstrings(SOURCE)] == ["What a module is told.", "Who calls it."]


def test_a_banned_phrase_is_found_across_a_break_of_lines():
    assert banned_in("the memory is let\\ngo, and it was told".replace("\\n", "\n")) == [(1, "let go"), (2, "told")]


def test_messages_need_no_you_and_pages_do():
    num_words, counts = counted("the rank reads its shard " * 200)
    assert broken_rates(num_words, counts) == ["you"]
    assert broken_rates(num_words, counts, {}) == []
    assert broken_rates(*counted("what the rank reads " * 200), {}) == ["what"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("house", HOUSES)
def test_messages_of_every_house_keep_the_rules(house: str, capsys: pytest.CaptureFixture[str]):
    assert checked_house(house), capsys.readouterr().out


def test_comments_on_adjacent_lines_are_one():
    source = "a = 1  # what is let\nb = 2  # go\n\n# another\n"
    assert comments(source) == [(1, "what is let\ngo"), (4, "another")]
    assert banned_in(comments(source)[0][1]) == [(1, "let go")]


def test_a_later_paragraph_of_a_docstring_is_no_code_block():
    source = (
        'def f():\n    """The size.\n\n    The rank is told it; ``what`` is code.\n\n        what = table\n    """\n'
    )
    ((_, text),) = docstrings(source)
    assert banned_in(prose(text)) == [(3, "told")]
    assert counted(prose(text))[1]["what"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", folders())
def test_docstrings_and_comments_of_every_folder_keep_the_rules(name: str, capsys: pytest.CaptureFixture[str]):
    assert checked_folder(name, folders()[name]), capsys.readouterr().out
