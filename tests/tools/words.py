"""Plain English in pages and messages: no banned phrase, few "what" and "where", and in pages the reader is "you".

``python -m tests.tools.words [PAGE…]`` prints the place of each banned phrase and the counts of each page; without PAGE
also those of the messages of each house (errors, fixes, help texts, reports), and counts of docstrings, which have no
limit. The exit code is 1 if a page or a house breaks a rule. Code blocks, inline code and link targets are not read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.tools.paths import ROOT
from tests.tools.product_strings import docstrings, messages

BANNED = (
    "tells?", "told", "telling", "meets?", "met", "who", "whose", "whom", "dealt", "deals?", "dealing",
    "lets? go", "letting go", "let .{1,20} go", r"comput\w+( \w+)? again", "lines? of (your|the) code",
    "with (its|your) line", "by (its|your) line", "that which", "whatever breaks",
    "numbers that are none", "goes on whatever", "as it is", "as it was", "and not before",
    "put back", "hand it to", "somebody", "nobody", "laid out anew", "comes? to stand",
)  # fmt: skip
HOUSES = ("planner", "passes", "runtime")
AT_MOST = {"what": 3, "where": 2}  # in 1,000 words
AT_LEAST = {"you": 2}
CODE = re.compile(
    r"(?s:^```.*?^```)|(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+|``[^`\n]+``|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE
)
PHRASES = [(phrase, re.compile(rf"\b{phrase}\b".replace(" ", r"\s+"), re.IGNORECASE)) for phrase in BANNED]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """The text with code blanked out; line numbers stay."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def banned_in(text: str) -> list[tuple[int, str]]:
    """(line, phrase) of each banned phrase."""
    found = [(text.count("\n", 0, hit.start()) + 1, hit[0]) for _, phrase in PHRASES for hit in phrase.finditer(text)]
    return sorted((line, " ".join(words.split())) for line, words in found)


def counted(text: str) -> tuple[int, dict[str, int]]:
    """(number of words, count of each word that has a rate)."""
    words = re.findall(r"[a-z][a-z'-]*", text.lower())
    families = {"you": ("you", "your", "yours", "yourself")}
    return len(words), {w: sum(map(words.count, families.get(w, (w,)))) for w in (*AT_MOST, *AT_LEAST)}


def broken_rates(num_words: int, counts: dict[str, int], at_least: Mapping[str, float] = AT_LEAST) -> list[str]:
    """Words outside their rates. Limits are rounded in favour of short pages."""
    many = [w for w, rate in AT_MOST.items() if counts[w] > math.ceil(rate * num_words / 1000)]
    return many + [w for w, rate in at_least.items() if counts[w] < math.floor(rate * num_words / 1000)]


def checked(page: Path) -> bool:
    """Print the counts of one page; whether it passes."""
    name, text = page.relative_to(ROOT).as_posix(), prose(page.read_text())
    found, (num_words, counts) = banned_in(text), counted(text)
    for line, phrase in found:
        print(f"{name}:{line}: {phrase}")
    return shown(name, num_words, counts, len(found), broken_rates(num_words, counts))


def checked_house(house: str) -> bool:
    """Print the counts of the messages and the docstrings of one house; whether its messages pass."""
    files = {file.relative_to(ROOT).as_posix(): file.read_text() for file in sorted((ROOT / house).rglob("*.py"))}
    num_banned, texts = 0, []
    for name, source in files.items():
        for first, text in messages(source):
            texts.append(prose(text))
            for line, phrase in banned_in(texts[-1]):
                num_banned += 1
                print(f"{name}:{first + line - 1}: {phrase}")
    num_words, counts = counted("\n".join(texts))
    passes = shown(f"{house}: messages", num_words, counts, num_banned, broken_rates(num_words, counts, {}))
    others = [prose(text) for source in files.values() for _, text in docstrings(source)]
    shown(f"{house}: docstrings", *counted("\n".join(others)), sum(len(banned_in(text)) for text in others), None)
    return passes


def shown(name: str, num_words: int, counts: dict[str, int], num_banned: int, rates: list[str] | None) -> bool:
    """Print one row of counts; whether it passes. ``rates``: the words outside their rates; None: there is no limit."""
    is_broken = rates is not None and bool(num_banned or rates)
    state = f"BROKEN {' '.join(rates or ())}" if is_broken else ""
    cells = "  ".join(f"{word} {count:4} ({1000 * count / num_words:4.1f})" for word, count in counts.items())
    print(f"{name:34} {num_words:6} words  {cells}  banned {num_banned:3}  {state}")
    return not is_broken


def main(names: list[str]) -> int:
    passes = [checked(ROOT / name) for name in names] or [checked(page) for page in pages()]
    return int(not all(passes + [checked_house(house) for house in HOUSES if not names]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
