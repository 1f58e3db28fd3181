"""Products: written as text, einsum by its own equation. A bias would be added once for each part of a sum, so with a
bias the summed dim is mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from passes.rules.call import Call
from passes.rules.notation import Pattern, parse
from passes.rules.rule import OpRule

Builder = Callable[[Call], OpRule | None]


def text(*patterns: str) -> Builder:
    """The first of the patterns that fits."""
    return text_of(*(parse(pattern) for pattern in patterns))


def text_of(*parsed: Pattern) -> Builder:
    def rule(call: Call) -> OpRule | None:
        return _first(parsed, call)

    return rule


def _first(patterns: Sequence[Pattern], call: Call) -> OpRule | None:
    return next((pattern.rule(call) for pattern in patterns if pattern.fits(call)), None)


def einsum(call: Call) -> OpRule | None:
    equation = str(call.given["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    letters = left.replace(",", "").replace(".", "")
    if not arrow:
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    try:
        pattern = parse(f"{', '.join(_spaced(t, right) for t in left.split(','))} -> {_spaced(right, right)}")
    except ValueError:
        return None  # a diagonal
    return _first([pattern], call)


def _spaced(term: str, result: str) -> str:
    head, dots, tail = term.partition("...")
    return " ".join([*_marked(head, result), *([dots] if dots else []), *_marked(tail, result)])


def _marked(letters: str, result: str) -> list[str]:
    return [letter if letter in result else f"{letter}+" for letter in letters]


linear = text("... i+, o i+ -> ... o", "... i^, o i^, o -> ... o", "... i+, i+ -> ...")
matmul = text("... m k+, ... k+ n -> ... m n", "k+, k+ ->", "... m k+, k+ -> ... m", "k+, ... k+ n -> ... n")
addmm = text("m n, m k^, k^ n -> m n", "n, m k^, k^ n -> m n")
baddbmm = text("b m n, b m k^, b k^ n -> b m n", "m n, b m k^, b k^ n -> b m n", "n, b m k^, b k^ n -> b m n")
addmv = text("m, m k^, k^ -> m", ", m k^, k^ -> m")
addbmm = text("m n, b^ m k^, b^ k^ n -> m n", "n, b^ m k^, b^ k^ n -> m n")
grouped = text("t^ i+, e^ i+ o, e^ -> t^ o")  # which matrix multiplies a row follows from its position
embedding = text("v^ h, ... -> ... h")
