"""Plain English in the pages: no banned phrase, few "what" and "where", and the reader is "you".

``python -m tests.tools.words [PAGE…]`` prints the place of each banned phrase and the counts of each page. The exit
code is 1 if a page breaks a rule. Code blocks, inline code and link targets are not read.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from tests.tools.paths import ROOT

BANNED = (
    "tells?", "told", "telling", "meets?", "met", "who", "whose", "whom", "dealt", "deals?", "dealing",
    "lets? go", "letting go", "let .{1,20} go", r"comput\w+( \w+)? again", "lines? of (your|the) code",
    "with (its|your) line", "by (its|your) line", "that which", "whatever breaks",
    "numbers that are none", "goes on whatever", "as it is", "as it was", "and not before",
    "put back", "hand it to", "somebody", "nobody", "laid out anew", "comes? to stand",
)  # fmt: skip
AT_MOST = {"what": 3, "where": 2}  # in 1,000 words
AT_LEAST = {"you": 2}
CODE = re.compile(r"(?s:^```.*?^```)|(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE)
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


def broken_rates(num_words: int, counts: dict[str, int]) -> list[str]:
    """Words outside their rates. Limits are rounded in favour of short pages."""
    many = [w for w, rate in AT_MOST.items() if counts[w] > math.ceil(rate * num_words / 1000)]
    return many + [w for w, rate in AT_LEAST.items() if counts[w] < math.floor(rate * num_words / 1000)]


def checked(page: Path) -> bool:
    """Print the counts of one page; whether it passes."""
    name, text = page.relative_to(ROOT).as_posix(), prose(page.read_text())
    found, (num_words, counts) = banned_in(text), counted(text)
    rates = broken_rates(num_words, counts)
    for line, phrase in found:
        print(f"{name}:{line}: {phrase}")
    state = f"BROKEN {' '.join(rates)}" if found or rates else ""
    shown = "  ".join(f"{word} {count:3} ({1000 * count / num_words:4.1f})" for word, count in counts.items())
    print(f"{name:34} {num_words:5} words  {shown}  banned {len(found):3}  {state}")
    return not state


def main(names: list[str]) -> int:
    due = [ROOT / name for name in names] or pages()
    return int(not all([checked(page) for page in due]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
