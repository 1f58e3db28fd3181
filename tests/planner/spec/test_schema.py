"""The JSON schema of a spec: it allows what the planner allows, and explains every key."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from passes.errors import SpecError
from planner.commands.cli import app
from planner.spec.fields import LARGEST_SIZE, json_schema
from planner.spec.lines import read_yaml
from planner.spec.spec import Spec

pytestmark = pytest.mark.check

EXAMPLES = sorted(Path(str(files("specs"))).glob("*.yaml"))
SCHEMA = json_schema(Spec)
KINDS = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "object": dict}


def complaints(value: Any, node: dict[str, Any], path: str = "") -> Iterator[str]:
    """What a reader of JSON schemas finds wrong: the words of the schema that ours uses, and no others."""
    if "$ref" in node:
        node = {**SCHEMA["$defs"][node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
    if "anyOf" in node and not any(not list(complaints(value, option)) for option in node["anyOf"]):
        yield f"{path}: {value} is none of its forms"
    if value not in node.get("enum", [value]) or value != node.get("const", value):
        yield f"{path}: {value} is not allowed"
    if "type" in node and not any(_is(value, kind) for kind in _listed(node["type"])):
        yield f"{path}: {value} is no {node['type']}"
        return
    if isinstance(value, dict):
        yield from (f"{path}.{key} is missing" for key in node.get("required", []) if key not in value)
        for key, item in value.items():
            inner = node.get("properties", {}).get(key, node.get("additionalProperties", {}))
            yield from complaints(item, inner, f"{path}.{key}") if inner is not False else [f"{path}.{key} is unknown"]
    elif isinstance(value, list):
        items = node.get("prefixItems") or [node.get("items", {})] * len(value)
        if not node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value)):
            yield f"{path}: {len(value)} items"
        for index, (item, inner) in enumerate(zip(value, items, strict=False)):
            yield from complaints(item, inner, f"{path}.{index}")
    elif isinstance(value, str) and not re.search(node.get("pattern", ""), value):
        yield f"{path}: {value} is not of this form"
    elif isinstance(value, (int, float)):
        too_small = value < node.get("minimum", value) or not value > node.get("exclusiveMinimum", value - 1)
        too_large = value > node.get("maximum", value)
        if too_small or too_large or not value < node.get("exclusiveMaximum", value + 1):
            yield f"{path}: {value} is out of range"


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "properties" in node and "type" in node:
            yield node
        for value in node.values():
            yield from objects(value)
    elif isinstance(node, list):
        for value in node:
            yield from objects(value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_schema_allows_every_example(path):
    value, _ = read_yaml(path)
    assert list(complaints(value, SCHEMA)) == []
    assert list(complaints(Spec.load(path).to_dict(), SCHEMA)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"mash": {}},
        {"mesh": {"tpp": 2}},
        {"mesh": {"tp": 0}},
        {"mesh": "automatic"},
        {"batch": {"global": 8}},
        {"inputs": {"x": {"shape": [0]}}},
        {"inputs": {"x": {"dtype": "int"}}},
        {"loss": {"output": "a", "index": 1}},
        {"tensor_parallel": {"overrides": {"a": "colum"}}},
        {"tensor_parallel": {"sequence_parallel": 1}},
        {"pipeline": {"split": "even"}},
        {"optimizer": {"betas": [0.9]}},
        {"optimizer": {"betas": [0.9, 1]}},
        {"optimizer": {"eps": 0}},
        {"optimizer": {"zero": 4}},
        {"optimizer": {"schedule": {"kind": "cosin"}}},
        {"seed": -1},
        {"seed": None},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_planner_refuses(change):
    value = {"mesh": {"tp": 2}, "batch": {"global": 8, "micro": 2}, **change}
    assert len(list(complaints(value, SCHEMA))) == 1
    with pytest.raises(SpecError):
        Spec.load(value)


def test_every_key_is_explained_and_no_other_is_allowed():
    found = list(objects(SCHEMA))
    assert len(found) == 19  # the spec, its 14 sections, inputs, groups, {output: NAME}, {file: NAME}, an even split
    for node in found:
        assert node["additionalProperties"] is False
        assert all(inner["description"] for inner in node["properties"].values())


def test_the_schema_at_a_glance():
    """Its keys and their order: test_reference.py."""
    assert {key: value for key, value in SCHEMA.items() if key not in ("properties", "$defs")} == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The spec of a meshwright plan",
        "type": "object",
        "required": ["mesh", "batch"],
        "additionalProperties": False,
    }
    sections = (
        "Audit Batch CudaGraphs Data Experts Group Initialization Input LearningRate Mask Mesh Optimizer Pipeline "
        "Precision TensorParallel"
    )
    assert sorted(SCHEMA["$defs"]) == [f"{name}Spec" for name in sections.split()]


def test_a_key_tells_its_type_range_default_and_meaning():
    optimizer, mesh = SCHEMA["$defs"]["OptimizerSpec"]["properties"], SCHEMA["$defs"]["MeshSpec"]["properties"]
    assert optimizer["eps"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 1e-8,
        "description": "added to the denominator of the update",
    }
    assert optimizer["betas"]["prefixItems"] == [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}] * 2
    assert optimizer["alignment"]["enum"] == ["nccl", "none"]
    integer = {"type": "integer", "minimum": 1, "maximum": LARGEST_SIZE}
    size, auto, null = mesh["etp"]["anyOf"]
    assert (size, auto["const"], null) == (integer, "auto", {"type": "null"})


def test_the_command_writes_the_schema(tmp_path):
    file = tmp_path / "spec.schema.json"
    assert CliRunner().invoke(app, ["schema", "-o", str(file)]).exit_code == 0
    assert json.loads(file.read_text()) == SCHEMA
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == SCHEMA
