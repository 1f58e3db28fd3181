"""Factors of whole dims as text, one letter or word a factor.

    b m k+, b k+ n -> b m n          + : summed over         no mark: each index by itself
    ... i+, o i+ -> ... o            ...: any dims in front, broadcast as PyTorch does
    v^ h, ... -> ... h               ^ : mixed

A word of one operand alone must be marked; one of the result alone stands for new elements that no operand has.
"""

import re
from dataclasses import dataclass
from math import prod

from passes.rules.rule import RESULT, Call, Factors, OpRule, Role, Shape

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([+^]?)\Z")
MARKS = {role.value: role for role in Role}


@dataclass(frozen=True, slots=True)
class Pattern:
    """``operands``: the words of each. ``roles``: word → its role."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    roles: dict[str, Role]

    def __str__(self) -> str:
        marks = {word: role.value for word, role in self.roles.items()}
        terms = [" ".join(word + marks.get(word, "") for word in term) for term in (*self.operands, self.result)]
        return f"{', '.join(terms[:-1])} -> {terms[-1]}"

    def fits(self, call: Call) -> bool:
        """Return whether operands and dims are as many, and a word has one size in all its places (or 1, broadcast)."""
        shapes = (*call.shapes, call.result)
        terms = (*self.operands, self.result)
        if len(terms) != len(shapes) or any(not _covers(t, s) for t, s in zip(terms, shapes, strict=True)):
            return False
        return all(len({size for *_, size in places} - {1}) <= 1 for places in self._places(call).values())

    def _places(self, call: Call) -> dict[str, list[tuple[int, int, int]]]:
        """Map each word, and each dim of "...", to where it stands: (operand or RESULT, dim, size)."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        terms = zip((*self.operands, self.result), (*call.shapes, call.result), strict=True)
        for operand, (term, shape) in zip((*range(len(call.shapes)), RESULT), terms, strict=True):
            for word, dim in _dims(term, shape).items():
                found.setdefault(word, []).append((operand, dim, shape[dim]))
        return found

    def sizes(self, call: Call) -> dict[str, int]:
        """Map each word to its size in a call that it fits, and "..." to the product of all dims in front."""
        found = {word: max(1, *(size for *_, size in places)) for word, places in self._places(call).items()}
        front = [word for word in found if word.startswith("...")]
        return found | ({"...": prod(found.pop(word) for word in front)} if front else {})

    def rule(self, call: Call) -> OpRule:
        """Return the rule of a call that it fits."""
        factors = Factors(call)
        for word, places in self._places(call).items():
            factors.add(self.roles.get(word, Role.EACH), *((operand, dim) for operand, dim, _ in places))
        return factors.done()


def parse(text: str) -> Pattern:
    """Raise ValueError with the word, or the part, that is wrong."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f'"{text}" has not one "->" between its operands and its result')
    marks: dict[str, set[str]] = {}
    terms = [_words(term, marks) for term in (*(left.split(",") if left.strip() else []), right)]
    roles = {word: _role(word, found) for word, found in marks.items()}
    *operands, result = terms
    for word, role in roles.items():
        held = sum(word in term for term in operands)
        if role is Role.SUM and word in result:
            raise ValueError(f'"{word}+" is summed over and stands in the result')
        if role is Role.EACH and held and word not in result:
            raise ValueError(f'"{word}" is not in the result: mark it "{word}+" (summed over) or "{word}^" (mixed)')
    return Pattern(tuple(operands), result, roles)


def _words(term: str, marks: dict[str, set[str]]) -> tuple[str, ...]:
    words: list[str] = []
    for word in term.split():
        match = WORD.match(word)
        if word != "..." and match is None:
            raise ValueError(f'"{word}" is no word of letters, with an optional "+" or "^" behind it')
        name = word.rstrip("+^")
        if name in words:
            raise ValueError(f'"{name}" stands twice in "{term.strip()}"')
        if match is not None:
            marks.setdefault(name, set()).add(match[1])
        words.append(name)
    return tuple(words)


def _role(word: str, marks: set[str]) -> Role:
    """Return the role of a word: its mark may be left out if another place has it."""
    given = marks - {""}
    if len(given) > 1:
        raise ValueError(f'"{word}" is marked in two ways')
    return MARKS[given.pop() if given else ""]


def _covers(term: tuple[str, ...], shape: Shape) -> bool:
    return len(term) - 1 <= len(shape) if "..." in term else len(term) == len(shape)


def _dims(term: tuple[str, ...], shape: Shape) -> dict[str, int]:
    """Word → dim; the dims of "..." are counted from its last one, as "...0", "...1", …"""
    if "..." not in term:
        return {word: dim for dim, word in enumerate(term)}
    before = term.index("...")
    free = len(shape) - len(term) + 1
    found = {word: dim if dim < before else dim + free - 1 for dim, word in enumerate(term) if word != "..."}
    return found | {f"...{free - 1 - i}": before + i for i in range(free)}
