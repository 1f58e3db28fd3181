"""Read YAML into plain values and remember the line of every key.

The answer is (value, locations): ``locations["mesh.tp"]`` is the place of that key in the file; list items count from
zero (``optimizer.betas.1``). A key given twice is an error, because PyYAML would silently keep the last one. Aliases
and merges (``<<: *anchor``) are followed, up to as much as any file of this size could say without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from planner.errors import PlanError, SpecError, Where
from planner.files.text import KIB, read_text, shorten
from planner.spec.yaml_nodes import COLLECTIONS, MERGE, Nodes, scalar

MOST_BYTES = 256 * KIB
_MOST_STEPS = 2_000_000  # letters of the paths of all keys and items


def read_yaml(path: Path, what: str = "spec") -> tuple[Any, dict[str, Where]]:
    """The file's value and the place of each of its keys; ``what`` the file is, for the words of an error.

    Raises:
        SpecError: the file is missing, no regular file, too large or unreadable, is not valid YAML, gives a key twice,
            nests too deep or explodes into more than a file of its size holds.
    """
    fix = "give the path of a YAML file, or a dict"
    text = read_text(path, what, most_bytes=MOST_BYTES, error=SpecError, fix=fix)
    try:
        nodes = Nodes(text)
        node = nodes.get_single_node()
    except yaml.YAMLError as error:
        raise _syntax_error(error, path, text) from None
    except (ValueError, OverflowError) as error:  # a number of YAML's own: of a version, of a character
        raise SpecError(f"invalid YAML: {error}", where=Where(file=str(path)), fix="remove the escape") from None
    reader = _NodeReader(str(path))
    value = None if node is None else reader.value(node, "")
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


class _NodeReader:
    """Walks composed nodes. Owns: ``locations``, and ``errors`` of keys given twice, both filled on the way."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.locations: dict[str, Where] = {}
        self.errors: list[PlanError] = []
        self._open_nodes: set[int] = set()
        self._steps_left = _MOST_STEPS

    def value(self, node: yaml.Node, path: str) -> Any:
        self._step(node, 1 + len(path))
        self.locations.setdefault(path, self._where(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in COLLECTIONS:
            raise self._error(node, f"the tag {shorten(node.tag, 100)} has no meaning here", "remove the tag")
        with self._inside(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, join(path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        result = {}
        for key_node, value_node in self._entries(node):
            key = self._scalar(key_node)
            child = join(path, key)
            self.locations[child] = self._where(key_node)
            result[key] = self.value(value_node, child)
        return result

    def _entries(self, node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        """What `<<: *anchor` names, then the mapping's own: of a key that both have, the last one counts."""
        self._note_duplicates(node)
        merged, own = [], []
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                merged += self._merged(value_node)
            else:
                own.append((key_node, value_node))
        self._step(node, 10 * (1 + len(merged) + len(own)))
        return merged + own

    def _merged(self, node: yaml.Node) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        mappings = reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]
        entries = []
        for mapping in mappings:
            if not isinstance(mapping, yaml.MappingNode):
                raise self._error(mapping, "`<<` merges mappings, not this", "write `<<: *name` of a mapping's anchor")
            with self._inside(mapping):
                entries += self._entries(mapping)
        return entries

    def _note_duplicates(self, node: yaml.MappingNode) -> None:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a plain word", "write `key: value`")
            key, line = self._scalar(key_node), key_node.start_mark.line + 1
            if key in lines:
                what, fix = f"the key '{shorten(key)}' is given twice", f"keep one; the first is on line {lines[key]}"
                self.errors.append(self._error(key_node, what, fix))
            lines.setdefault(key, line)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return scalar(node)
        except ValueError as error:
            raise self._error(node, str(error), "write a value that a spec has, without a tag") from None

    @contextmanager
    def _inside(self, node: yaml.Node) -> Iterator[None]:
        if id(node) in self._open_nodes:
            raise self._error(node, "an alias refers to what contains it", "write the value out")
        self._open_nodes.add(id(node))
        try:
            yield
        finally:
            self._open_nodes.discard(id(node))

    def _step(self, node: yaml.Node, size: int) -> None:
        self._steps_left -= size
        if self._steps_left < 0:
            raise self._error(node, "aliases repeat too much: the file explodes", "write the values out")

    def _error(self, node: yaml.Node, what: str, fix: str) -> SpecError:
        return SpecError(what, where=self._where(node), fix=fix)

    def _where(self, node: yaml.Node) -> Where:
        return Where(file=self.file, line=node.start_mark.line + 1)


def join(path: str, key: object) -> str:
    """The dotted path of a key inside ``path``: ("mesh", "tp") is "mesh.tp"."""
    return f"{path}.{key}" if path else str(key)


def locate(locations: Mapping[str, Where], path: str) -> Where:
    """The place of ``path``, or of the nearest key around it; for a spec that was a dict, the dotted path itself."""
    if not locations:
        return Where(module=shorten(path) or "the spec")
    while path not in locations:
        path = path.rpartition(".")[0]
    return locations[path]
