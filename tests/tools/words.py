"""Plain English in pages, messages and docstrings: no banned phrase, few "what" and "where"; pages address "you".

``python -m tests.tools.words [PAGE…]`` prints the place of each banned phrase and the counts of each page; without PAGE
also those of the messages of each house (errors, fixes, help texts, reports), and of the docstrings and comments of
each folder. The exit code is 1 if one of them breaks a rule. Code blocks, inline code and link targets are not read.

A message is any string that is not a docstring and has three words in a row. A field of an f-string becomes ``…``, and
counts as a word.
"""

import ast
import inspect
import io
import math
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.tools.paths import ROOT

BANNED = (
    "tells?", "told", "telling", "meets?", "met", "who", "whose", "whom", "dealt", "deals?", "dealing",
    "lets? go", "letting go", "let .{1,20} go", r"comput\w+( \w+)? again", "lines? of (your|the) code",
    "with (its|your) line", "by (its|your) line", "that which", "whatever breaks",
    "numbers that are none", "goes on whatever", "as it is", "as it was", "and not before",
    "put back", "hand it to", "somebody", "nobody", "laid out anew", "comes? to stand",
)  # fmt: skip
HOUSES = ("planner", "passes", "runtime")
DOCUMENTED = (*HOUSES, "benchmarks", "examples", "specs")  # their docstrings and comments keep the rules too
NOT_YET = ("tests",)  # folders that do not keep them yet: their docstrings and comments are not checked
AT_MOST = {"what": 3, "where": 2}  # in 1,000 words
AT_LEAST = {"you": 2}
CODE = re.compile(
    r"(?s:^```.*?^```)|(?:(?<=\n\n)|\A)(?: {4}.*(?:\n|\Z)|\n(?= {4}))+|``[^`\n]+``|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE
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


def folders() -> dict[str, list[Path]]:
    """Name of a folder, of one level or two → the Python files below it, for all folders with checked docstrings."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(file for top in DOCUMENTED for file in (ROOT / top).rglob("*.py")):
        found["/".join(file.relative_to(ROOT).parent.parts[:2])].append(file)
    return found


def checked(page: Path) -> bool:
    """Print the counts of one page; whether it passes."""
    return _checked(page.relative_to(ROOT).as_posix(), [(page, 1, page.read_text())], AT_LEAST)


def checked_house(house: str) -> bool:
    """Print the counts of the messages of one house; whether they pass."""
    files = sorted((ROOT / house).rglob("*.py"))
    return _checked(f"{house}: messages", [(f, *found) for f in files for found in messages(f.read_text())], {})


def checked_folder(name: str, files: Iterable[Path]) -> bool:
    """Print the counts of the docstrings and comments of one folder; whether they pass."""
    texts = [(f, *found) for f in files for of in (docstrings, comments) for found in of(f.read_text())]
    return _checked(f"{name}: docstrings", texts, {})


def _checked(name: str, texts: Iterable[tuple[Path, int, str]], at_least: Mapping[str, float]) -> bool:
    """``texts``: (file, first line, text). Prints the place of each banned phrase, then the counts of all texts."""
    texts = [(file, first, prose(text)) for file, first, text in texts]
    found = [(file, first + line - 1, words) for file, first, text in texts for line, words in banned_in(text)]
    for file, line, words in found:
        print(f"{file.relative_to(ROOT).as_posix()}:{line}: {words}")
    num_words, counts = counted("\n".join(text for *_, text in texts))
    return shown(name, num_words, counts, len(found), broken_rates(num_words, counts, at_least))


def shown(name: str, num_words: int, counts: dict[str, int], num_banned: int, rates: list[str]) -> bool:
    """Print one row of counts; whether it passes. ``rates``: the words outside their rates."""
    is_broken = bool(num_banned or rates)
    state = f"BROKEN {' '.join(rates)}" if is_broken else ""
    cells = "  ".join(f"{word} {count:4} ({1000 * count / max(1, num_words):4.1f})" for word, count in counts.items())
    print(f"{name:34} {num_words:6} words  {cells}  banned {num_banned:3}  {state}")
    return not is_broken


def main(names: list[str]) -> int:
    if names:
        return int(not all([checked(ROOT / name) for name in names]))
    passes = [checked(page) for page in pages()] + [checked_house(house) for house in HOUSES]
    passes += [checked_folder(name, files) for name, files in folders().items()]
    print(f"docstrings and comments that are not checked yet: {', '.join(NOT_YET)}")
    return int(not all(passes))


_PROSE = re.compile(r"(?:[A-Za-z]+|…)[,;:]? (?:[A-Za-z]+|…)[,;:]? (?:[A-Za-z]+|…)")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


def messages(source: str) -> list[tuple[int, str]]:
    """(line, text) of each message, in the order of lines."""
    tree = ast.parse(source)
    skipped = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node and isinstance(part, ast.Constant)}
    found = [
        (node.lineno, _text(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in skipped
    ]
    return sorted((line, text) for line, text in found if _PROSE.search(text))


def docstrings(source: str) -> list[tuple[int, str]]:
    """(line, text) of each docstring of a module, a class or a function, without the indentation of its code."""
    return sorted((node.lineno, inspect.cleandoc(_text(node))) for node in _docstrings(ast.parse(source)))


def comments(source: str) -> list[tuple[int, str]]:
    """(line, text) of each comment; comments on adjacent lines are one."""
    found: list[tuple[int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if not found or found[-1][0] + len(found[-1][1]) != token.start[0]:
                found.append((token.start[0], []))
            found[-1][1].append(token.string.lstrip("# "))
    return [(line, "\n".join(texts)) for line, texts in found]


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, _DOCUMENTED) and node.body and isinstance(first := node.body[0], ast.Expr):
        value = first.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value
    for field in _STATEMENTS:  # faster than ast.walk, which visits expressions too
        children = getattr(node, field, None)
        for child in children if isinstance(children, list) else ():
            yield from _docstrings(child)


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
