"""Read YAML into plain values and remember the line of every key.

The answer is (value, locations): ``locations["mesh.tp"]`` is the place of that key in the file; list items count from
zero (``optimizer.betas.1``). PyYAML follows YAML 1.1, which takes ``1e-8`` for a string; here it is a number, as in
YAML 1.2. A key given twice is an error, because PyYAML would silently keep the last one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.errors import PlanError, SpecError, Where

EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats; its own table, so that no other user of PyYAML sees the change."""


_FLOAT = re.compile(f"^{EXPONENT.pattern}$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def read_yaml(path: Path, what: str = "spec") -> tuple[Any, dict[str, Where]]:
    """The file's value and the place of each of its keys; ``what`` the file is, for the words of an error.

    Raises:
        SpecError: the file is missing or unreadable, is not valid YAML, or gives a key twice.
    """
    text = _read_text(path, what)
    loader = _Loader("")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _NodeReader(loader, str(path))
        value = None if node is None else reader.value(node, "")
        if reader.errors:
            raise SpecError.of(reader.errors)
        return value, reader.locations
    except yaml.YAMLError as error:
        raise _syntax_error(error, path, text) from None
    finally:
        loader.dispose()


def _read_text(path: Path, what: str) -> str:
    fix = "give the path of a YAML file, or a dict"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"there is no {what} file {path}", where=str(path), fix=fix) from None
    except IsADirectoryError:
        raise SpecError(f"the {what} {path} is a directory", where=str(path), fix=fix) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SpecError(
            f"the {what} is not UTF-8 text", where=Where(file=str(path), line=line), fix="save the file as UTF-8"
        ) from None
    except OSError as error:
        raise SpecError(f"cannot read the {what} {path}: {error.strerror}", where=str(path), fix=fix) from None


def _syntax_error(error: yaml.YAMLError, path: Path, text: str) -> SpecError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, what = error.problem_mark.line + 1, ", ".join(filter(None, (error.context, error.problem)))
    else:  # a character that YAML forbids: the reader knows its position only
        line, what = text.count("\n", 0, getattr(error, "position", 0)) + 1, getattr(error, "reason", str(error))
    return SpecError(
        f"invalid YAML: {what}",
        where=Where(file=str(path), line=line),
        fix="check the indentation (spaces, no tabs), brackets, quotes and colons around this line",
    )


class _NodeReader:
    """Walks composed nodes. Owns: ``locations``, and ``errors`` of keys given twice, both filled on the way."""

    def __init__(self, loader: _Loader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.locations: dict[str, Where] = {}
        self.errors: list[PlanError] = []
        self.open_nodes: set[int] = set()

    def value(self, node: yaml.Node, path: str) -> Any:
        self.locations.setdefault(path, self._where(node))
        if isinstance(node, yaml.ScalarNode):
            return self.loader.construct_object(node)
        if node.tag not in _COLLECTIONS:
            raise SpecError(f"the tag {node.tag} has no meaning here", where=self._where(node), fix="remove the tag")
        if id(node) in self.open_nodes:
            raise SpecError("an alias refers to what contains it", where=self._where(node), fix="write the value out")
        self.open_nodes.add(id(node))
        try:
            return self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        self._note_duplicates(node)
        self.loader.flatten_mapping(node)  # brings in what `<<: *anchor` names, before the mapping's own keys
        result = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            child = join(path, key)
            self.locations[child] = self._where(key_node)
            result[key] = self.value(value_node, child)
        return result

    def _sequence(self, node: yaml.Node, path: str) -> list[Any]:
        return [self.value(item, join(path, index)) for index, item in enumerate(node.value)]

    def _note_duplicates(self, node: yaml.MappingNode) -> None:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in lines:
                first = lines[key]
                what, fix = f"the key '{key}' is given twice", f"keep one; the first is on line {first}"
                self.errors.append(SpecError(what, where=self._where(key_node), fix=fix))
            lines.setdefault(key, line)

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise SpecError("a key must be a plain word", where=self._where(node), fix="write `key: value`")
        return node.value if node.tag == "tag:yaml.org,2002:merge" else self.loader.construct_object(node)

    def _where(self, node: yaml.Node) -> Where:
        return Where(file=self.file, line=node.start_mark.line + 1)


def join(path: str, key: object) -> str:
    """The dotted path of a key inside ``path``: ("mesh", "tp") is "mesh.tp"."""
    return f"{path}.{key}" if path else str(key)


def locate(locations: Mapping[str, Where], path: str) -> Where:
    """The place of ``path``, or of the nearest key around it; for a spec that was a dict, the dotted path itself."""
    if not locations:
        return Where(module=path or "the spec")
    while path not in locations:
        path = path.rpartition(".")[0]
    return locations[path]
