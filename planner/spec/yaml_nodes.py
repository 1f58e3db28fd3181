"""The YAML that a spec may be written in: PyYAML's nodes, with fewer types than YAML has.

    null   ~ null          bool   true yes on …       int   12 40_000_000       float   1.5 1e-8 .inf

All else is a string: no dates, no base 60, no octal numbers (``012``). PyYAML follows YAML 1.1, which takes ``1e-8``
for a string; here it is a number, as in YAML 1.2. A tag that would make anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from yaml import MappingNode, Node, SafeLoader, ScalarNode

from planner.files.json_text import parse_integer
from planner.files.text import shorten

EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+", re.ASCII)
_CORE = "tag:yaml.org,2002:"
MERGE = f"{_CORE}merge"
COLLECTIONS = (f"{_CORE}map", f"{_CORE}seq")
_TRUE = ("yes", "true", "on")


def _bool(text: str) -> bool:
    return text.lower() in _TRUE


def _int(text: str) -> int:
    return parse_integer(text.replace("_", ""))


def _float(text: str) -> float:
    name = text.lower().replace("_", "")
    if name.endswith((".inf", ".nan")):
        return float(name.replace(".", ""))
    if abs(value := float(name)) == float("inf"):
        raise ValueError(f"the number {shorten(text, 40)} is too large")
    return value


def _any_case(*words: str) -> re.Pattern[str]:
    """Each word in lower case, in upper case, and with a capital."""
    return re.compile("|".join(form for word in words for form in (word, word.upper(), word.capitalize())))


_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    f"{_CORE}null": (re.compile("~|null|Null|NULL|"), lambda text: None),
    f"{_CORE}bool": (_any_case("yes", "no", "true", "false", "on", "off"), _bool),
    f"{_CORE}int": (re.compile(r"[-+]?(0|[1-9][0-9_]*)"), _int),
    f"{_CORE}float": (
        re.compile(rf"{EXPONENT.pattern}|[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"),
        _float,
    ),
    f"{_CORE}str": (re.compile("(?s:.*)"), str),
    MERGE: (re.compile("<<"), str),
}


def scalar(node: ScalarNode) -> Any:
    """The value of a scalar. Raises ValueError if its tag does not fit it, or is not supported."""
    pattern, make = _SCALARS.get(node.tag, (None, str))
    if pattern is None:
        raise ValueError(f"the tag {shorten(node.tag, 100)} is not supported")
    if not pattern.fullmatch(node.value):
        raise ValueError(f"`{shorten(node.value, 40)}` is not of the type of its tag, {node.tag.removeprefix(_CORE)}")
    value = make(node.value)
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("a string contains a lone surrogate (half a character)")
    return value


MOST_LEVELS = 150  # of mappings and lists inside of each other


class Nodes(SafeLoader):
    """Text to nodes. Raises yaml.YAMLError, ValueError or OverflowError for numbers inside of YAML's own syntax, and
    RecursionError beyond ``MOST_LEVELS``: Python's own limit is another in a process that has compiled code.
    """

    _levels = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        """The tag of a node that has none."""
        if kind is not ScalarNode:
            return COLLECTIONS[kind is not MappingNode]
        if not implicit[0]:
            return f"{_CORE}str"
        return next(tag for tag in (MERGE, *_SCALARS) if _SCALARS[tag][0].fullmatch(value))
