"""Read YAML into plain values and remember the line of every key.

The answer is (value, locations): ``locations["mesh.tp"]`` is the place of that key in the file; list items count from
zero (``optimizer.betas.1``). A key given twice is an error, because PyYAML would silently keep the last one. Aliases
and merges (``<<: *anchor``) are followed, up to ``MOST_LETTERS``: aliases of aliases would fill the memory.

Values have fewer types than in YAML:

    null   ~ null          bool   true yes on …       int   12 40_000_000       float   1.5 1e-8 .inf

All else is a string: no dates, no base 60, no octal numbers (``012``). PyYAML follows YAML 1.1, which takes ``1e-8``
for a string; here it is a number, as in YAML 1.2. A tag that would make anything else is refused.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode, Node, SafeLoader, ScalarNode

from passes.errors import PlanError, SpecError, Where
from planner.files.text import KIB, parse_integer, read_text, shorten

MOST_BYTES = 256 * KIB
MOST_LETTERS = 2_000_000  # of the paths of all keys and items
EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+", re.ASCII)
_CORE = "tag:yaml.org,2002:"
MERGE = f"{_CORE}merge"
COLLECTIONS = (f"{_CORE}map", f"{_CORE}seq")
_TRUE = ("yes", "true", "on")
MOST_LEVELS = 150  # of mappings and lists inside of each other


def read_yaml(path: Path, what: str = "spec") -> tuple[Any, dict[str, Where]]:
    """Return the file's value and the place of each of its keys; ``what``: the kind of file, for errors.

    Raises:
        SpecError: the file is missing, no regular file, too large or unreadable, is not valid YAML, gives a key twice,
            nests too deep or repeats aliases too often.
    """
    fix = "give the path of a YAML file"
    text = read_text(path, what, most_bytes=MOST_BYTES, error=SpecError, fix=fix)
    reader = _NodeReader(str(path))
    try:
        node = Nodes(text).get_single_node()
        value = None if node is None else reader.value(node, "")
    except PlanError:  # a ValueError too
        raise
    except yaml.YAMLError as error:
        raise _syntax_error(error, path, text) from None
    except RecursionError:
        words = "invalid YAML: nested too deeply, or an alias refers to the value that contains it"
        fix = "remove brackets or indentation, and write the value of such an alias in full"
        raise SpecError(words, where=Where(file=str(path)), fix=fix) from None
    except (ValueError, OverflowError) as error:  # a number of YAML's own: of a version, of a character
        raise SpecError(f"invalid YAML: {error}", where=Where(file=str(path)), fix="remove the escape") from None
    if reader.errors:
        raise SpecError.of(reader.errors, f"the {what}")
    return value, reader.locations


def _syntax_error(error: yaml.YAMLError, path: Path, text: str) -> SpecError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, what = error.problem_mark.line + 1, ", ".join(filter(None, (error.context, error.problem)))
    else:  # a character that YAML forbids: the reader knows its position only
        line, what = text.count("\n", 0, getattr(error, "position", 0)) + 1, getattr(error, "reason", str(error))
    return SpecError(
        f"invalid YAML: {shorten(what)}",
        where=Where(file=str(path), line=line),
        fix="check the indentation (spaces, no tabs), brackets, quotes and colons around this line",
    )


def _float(text: str) -> float:
    name = text.lower().replace("_", "")
    if name.endswith((".inf", ".nan")):
        return float(name.replace(".", ""))
    if abs(value := float(name)) == float("inf"):
        raise ValueError(f"the number {shorten(text, 40)} is too large")
    return value


def _any_case(*words: str) -> re.Pattern[str]:
    """Match each word in lower case, in upper case, and with a capital."""
    return re.compile("|".join(form for word in words for form in (word, word.upper(), word.capitalize())))


_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    f"{_CORE}null": (re.compile("~|null|Null|NULL|"), lambda text: None),
    f"{_CORE}bool": (_any_case("yes", "no", "true", "false", "on", "off"), lambda text: text.lower() in _TRUE),
    f"{_CORE}int": (re.compile(r"[-+]?(0|[1-9][0-9_]*)"), lambda text: parse_integer(text.replace("_", ""))),
    f"{_CORE}float": (
        re.compile(rf"{EXPONENT.pattern}|[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"),
        _float,
    ),
    f"{_CORE}str": (re.compile("(?s:.*)"), str),
    MERGE: (re.compile("<<"), str),
}


def scalar(node: ScalarNode) -> Any:
    """Return the value of a scalar. Raises ValueError if its tag does not fit it, or is not supported."""
    pattern, make = _SCALARS.get(node.tag, (None, str))
    if pattern is None:
        raise ValueError(f"the tag {shorten(node.tag, 100)} is not supported")
    if not pattern.fullmatch(node.value):
        raise ValueError(f"`{shorten(node.value, 40)}` is not of the type of its tag, {node.tag.removeprefix(_CORE)}")
    value = make(node.value)
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("a string contains a lone surrogate (half a character)")
    return value


class Nodes(SafeLoader):
    """Composes nodes. Raises yaml.YAMLError, ValueError or OverflowError for numbers inside YAML's own syntax, and
    RecursionError beyond ``MOST_LEVELS``: Python's own limit differs in a process that has compiled code.
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
        """Return the tag of a node that has none."""
        if kind is not ScalarNode:
            return COLLECTIONS[kind is not MappingNode]
        if not implicit[0]:
            return f"{_CORE}str"
        return next(tag for tag in (MERGE, *_SCALARS) if _SCALARS[tag][0].fullmatch(value))


class _NodeReader:
    """Walks composed nodes. Owns ``locations``, and ``errors`` of keys given twice."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.locations: dict[str, Where] = {}
        self.errors: list[PlanError] = []
        self._letters = 0

    def value(self, node: yaml.Node, path: str) -> Any:
        self._count(node, 1 + len(path))
        self.locations.setdefault(path, self._where(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in COLLECTIONS:
            raise self._error(node, f"the tag {shorten(node.tag, 100)} is not supported", "remove the tag")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        return [self.value(item, join(path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, (key_node, value_node) in self._entries(node).items():
            child = join(path, key)
            self.locations[child] = self._where(key_node)
            result[key] = self.value(value_node, child)
        return result

    def _entries(self, node: yaml.Node) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """Return the keys that ``<<`` merges, then the mapping's own, which replace them."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "`<<` takes a mapping or a list of mappings", "write `<<: *name`")
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a single word", "write `key: value`")
            key = self._scalar(key_node)
            self._count(key_node, 10)
            if key in own:
                fix = f"remove one; the first is on line {own[key][0].start_mark.line + 1}"
                self.errors.append(self._error(key_node, f"the key '{shorten(key)}' is given twice", fix))
            elif key_node.tag == MERGE:
                is_list = isinstance(value_node, yaml.SequenceNode)
                for mapping in reversed(value_node.value) if is_list else [value_node]:
                    merged |= self._entries(mapping)
            else:
                own[key] = key_node, value_node
        return merged | own

    def _count(self, node: yaml.Node, letters: int) -> None:
        self._letters += letters
        if self._letters > MOST_LETTERS:
            raise self._error(node, "aliases repeat values too often", "write the values in full")

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return scalar(node)
        except ValueError as error:
            raise self._error(node, str(error), "write a plain value, without a tag") from None

    def _error(self, node: yaml.Node, what: str, fix: str) -> SpecError:
        return SpecError(what, where=self._where(node), fix=fix)

    def _where(self, node: yaml.Node) -> Where:
        return Where(file=self.file, line=node.start_mark.line + 1)


def join(path: str, key: object) -> str:
    """Return the dotted path of a key inside ``path``: ("mesh", "tp") is "mesh.tp"."""
    return f"{path}.{key}" if path else str(key)


def locate(locations: Mapping[str, Where], path: str) -> Where:
    """Return the place of ``path``, or of the nearest key around it; for a spec from a dict, the dotted path itself."""
    if not locations:
        return Where(module=shorten(path) or "the spec")
    while path not in locations:
        path = path.rpartition(".")[0]
    return locations[path]
