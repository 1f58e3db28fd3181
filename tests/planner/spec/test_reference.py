"""specs/reference.yaml: every key of the models, with its default and its meaning, and nothing else."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from planner.spec.fields import json_schema
from planner.spec.lines import read_yaml
from planner.spec.spec import Spec

REFERENCE = Path(str(files("specs"))) / "reference.yaml"
EXAMPLES = ("mesh", "batch", "inputs")  # these have no defaults: what stands there is an example
SCHEMA = json_schema(Spec)
LINE = re.compile(r"(?P<indent> *)((?P<key>\w+):(?P<value>.*?))?( *# (?P<comment>.*))?")


def keys(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of the schema, in its order; those of one input are not keys of the spec."""
    for name, inner in node["properties"].items():
        yield f"{path}{name}", inner
        for option in (inner, *inner.get("anyOf", [])):
            if "$ref" in option:
                yield from keys(SCHEMA["$defs"][option["$ref"].rpartition("/")[2]], f"{path}{name}.")


def explained() -> dict[str, str]:
    """Every key of the file and the comment beside it, which may go on in the lines below."""
    result: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in REFERENCE.read_text().splitlines()[1:]:
        found = LINE.fullmatch(line)
        assert found, line
        if found["key"]:
            indent = len(found["indent"])
            parents = [p for p in parents if p[0] < indent] + [(indent, found["key"])]
            path = ".".join(name for _, name in parents)
            result[path] = found["comment"] or ""
        elif found["comment"]:
            result[path] += f" {found['comment']}"
    return {path: text for path, text in result.items() if not path.startswith("inputs.")}


def at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[part]
    return value


def test_the_reference_has_every_key_in_the_order_of_the_models():
    assert list(explained()) == [path for path, _ in keys(SCHEMA)]


def test_the_comments_of_the_reference_are_the_descriptions_of_the_keys():
    assert explained() == {path: node["description"] for path, node in keys(SCHEMA)}


def test_the_values_of_the_reference_are_the_defaults():
    value, _ = read_yaml(REFERENCE)
    leaves = [(path, node) for path, node in keys(SCHEMA) if "$ref" not in str(node)]
    stated = {path: at(value, path) for path, _ in leaves if path.split(".")[0] not in EXAMPLES}
    assert stated == {path: node["default"] for path, node in leaves if path in stated}
    assert len(stated) >= 32  # a new key touches no number
