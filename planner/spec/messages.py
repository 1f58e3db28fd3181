"""What a user reads when keys or values of the spec are wrong: all of it in one error, in the order of the lines.

pydantic says at which keys it stumbled, the JSON schema what may stand there; the words follow from the schema.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from planner.errors import PlanError, SpecError, Where
from planner.spec.lines import join, locate

_TYPES = {
    "integer": ("a whole number", "write a whole number of {allowed}"),
    "number": ("a number", "write a number {allowed}, without quotes"),
    "boolean": ("true or false", "write true or false, without quotes"),
    "string": ("a string", "write a word, in quotes where YAML would read it as something else"),
    "array": ("a list", "write a list: [a, b]"),
    "object": ("a mapping", "write `key: value` pairs, or remove the key"),
}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "more than", "exclusiveMaximum": "less than"}
_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")


@dataclass(frozen=True)
class _Key:
    """A key of the spec: its dotted path, what stands there, and the schemas of what may."""

    path: str
    value: Any
    options: list[dict[str, Any]]

    @property
    def properties(self) -> dict[str, Any]:
        return next((option["properties"] for option in self.options if "properties" in option), {})


def spec_error(error: ValidationError, value: Any, locations: Mapping[str, Where], schema: dict[str, Any]) -> PlanError:
    """One error for everything that pydantic found in ``value``, whose JSON ``schema`` is given."""
    raised, found = [], {}
    for detail in error.errors(include_url=False):
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, PlanError):
            raised += getattr(own, "errors", ()) or (own,)
        else:
            problem = _problem(detail["type"], detail["loc"], value, schema)
            if problem is not None:
                found.setdefault(problem.where, problem)
    # of the branches of a union, the one that a value got into furthest tells what is wrong with it
    deepest = [e for path, e in found.items() if not any(other.startswith(f"{path}.") for other in found)]
    return SpecError.of([_located(e, locations) for e in (*deepest, *raised)])


def _located(error: PlanError, locations: Mapping[str, Where]) -> SpecError:
    where = error.where if isinstance(error.where, Where) else locate(locations, error.where or "")
    return SpecError(error.what, where=where, fix=error.fix)


def _problem(kind: str, loc: tuple[Any, ...], value: Any, schema: dict[str, Any]) -> SpecError | None:
    if loc and loc[-1] == "[key]":
        at = _key(loc[:-2], value, schema)
        what, fix = f"{at.path}: the key {describe_value(loc[-2])} must be a name", "put the key in quotes"
        return SpecError(what, where=join(at.path, loc[-2]), fix=fix)
    if kind in _UNKNOWN_KEY:
        return _unknown_key(_key(loc[:-1], value, schema), loc[-1])
    if kind == "missing" and isinstance(_key(loc[:-1], value, schema).value, Mapping):
        return _missing_key(_key(loc[:-1], value, schema), loc[-1])
    return _wrong_value(_key(loc, value, schema))


def _key(loc: tuple[Any, ...], value: Any, schema: dict[str, Any]) -> _Key:
    """The key at ``loc``, where pydantic names the branches of unions beside the keys of the data."""
    path, options = "", _options(schema, schema)
    for part in loc:
        if isinstance(value, Mapping) and part in value:
            inner = [o.get("properties", {}).get(part, o.get("additionalProperties")) for o in options]
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            inner = [o["prefixItems"][part] if "prefixItems" in o else o.get("items") for o in options]
        else:
            continue
        path, value = join(path, part), value[part]
        options = [option for node in inner if node for option in _options(node, schema)]
    return _Key(path, value, options)


def _options(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which one must hold."""
    if "$ref" in node:
        return [schema["$defs"][node["$ref"].rpartition("/")[2]]]
    return [option for branch in node["anyOf"] for option in _options(branch, schema)] if "anyOf" in node else [node]


def _unknown_key(at: _Key, name: object) -> SpecError:
    nearest = _nearest(name, at.properties)
    hint = f"did you mean '{nearest}'?" if nearest else f"known keys: {', '.join(at.properties)}"
    inside = f" in {at.path}" if at.path else ""
    return SpecError(f"unknown key '{name}'{inside}", where=join(at.path, name), fix=hint)


def _missing_key(at: _Key, name: str) -> SpecError | None:
    if any(_nearest(given, at.properties) == name for given in at.value if given not in at.properties):
        return None  # it is there, misspelt, and the error of the unknown key says so
    example = {name: at.properties[name]["examples"][0]}
    path = join(at.path, name)
    return SpecError(f"{path} is missing", where=path, fix=f"add `{flow(example)}`")


def _wrong_value(at: _Key) -> SpecError:
    words = [str(c) for o in at.options for c in o.get("enum", [o["const"]] if "const" in o else [])]
    kinds = [o for o in at.options if "enum" not in o and "const" not in o and o["type"] != "null"]
    if any(o.get("type") == "null" for o in at.options):
        words.append("null")
    if kinds:
        what, fix = _out_of_range(at, kinds) or _wrong_type(at, kinds[0], words)
        return SpecError(what, where=at.path, fix=fix)
    nearest = _nearest(at.value, words)
    hint = f"did you mean '{nearest}'? " if nearest else ""
    what, fix = f"{at.path} cannot be {describe_value(at.value)}", f"{hint}choose one of: {', '.join(words)}"
    return SpecError(what, where=at.path, fix=fix)


def _out_of_range(at: _Key, kinds: list[dict[str, Any]]) -> tuple[str, str] | None:
    """What to say of a value that has the right type."""
    for option in kinds:
        kind, value, allowed = option["type"], at.value, _allowed(option)
        if kind == "array" and isinstance(value, (list, tuple)) and "minItems" in option:
            length = option["minItems"]
            return f"{at.path} must have {length} items, not {len(value)}", f"give {length} items"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        if kind == "number" or (kind == "integer" and float(value).is_integer()):
            fix = f"set it to {option['minimum']} or more" if kind == "integer" else f"choose a number {allowed}"
            return f"{at.path} is {value:g}, it must be {allowed}", fix
    return None


def _wrong_type(at: _Key, option: dict[str, Any], words: list[str]) -> tuple[str, str]:
    expected, fix = _TYPES[option["type"]]
    expected, fix = " or ".join([expected, *words]), ", or ".join([fix.format(allowed=_allowed(option)), *words])
    return f"{at.path or 'the spec'} must be {expected}, not {describe_value(at.value)}", fix


def _allowed(option: dict[str, Any]) -> str:
    return " and ".join(f"{word} {option[name]:g}" for name, word in _LIMITS.items() if name in option)


def _nearest(word: object, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)), None)


def flow(value: Mapping[str, Any]) -> str:
    """A mapping on one line of YAML: ``mesh: {tp: 2, pp: 2}``."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]


def describe_value(value: Any) -> str:
    """How an error names a value: ``the string 'two'``, ``a list``, ``nothing``."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        return f"the string '{value}'"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"the list {list(value)}"
    if isinstance(value, (bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return f"a {type(value).__name__}"
