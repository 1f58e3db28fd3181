"""Errors about keys and values of the spec: all of them in one error, in the order of the lines.

pydantic reports the keys, and the JSON schema the allowed values; the words follow from the schema.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from passes.errors import PlanError, SpecError, Where
from planner.files.text import shorten
from planner.spec.lines import join, locate

_TYPES = {
    "integer": ("a whole number", "write a whole number of {allowed}"),
    "number": ("a number", "write a number {allowed}, without quotes"),
    "boolean": ("true or false", "write true or false, without quotes"),
    "string": ("a string", "write a word, in quotes if YAML would read it as another type"),
    "array": ("a list", "write a list: [a, b]"),
    "object": ("a mapping", "write `key: value` pairs, or remove the key"),
}
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}
_MOST_ERRORS = 100  # of a file in which hardly anything is right
_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")
_UNQUOTED = re.compile(r"true|false|-?[0-9]{1,18}(\.[0-9]+)?")


@dataclass(frozen=True)
class _Key:
    """A key of the spec: its dotted path, its value, and the schemas of allowed values."""

    path: str
    value: Any
    options: list[dict[str, Any]]

    @property
    def properties(self) -> dict[str, Any]:
        return next((option["properties"] for option in self.options if "properties" in option), {})

    @property
    def key_names(self) -> list[str]:
        """Return the keys that a mapping of values of one kind may have; none if any name is allowed."""
        return next((names["enum"] for o in self.options if "enum" in (names := o.get("propertyNames", {}))), [])


def spec_error(
    error: ValidationError,
    value: Any,
    locations: Mapping[str, Where],
    schema: dict[str, Any],
    what: str = "the spec",
) -> PlanError:
    """Return one error for everything that pydantic found in ``value``, by its JSON ``schema``."""
    raised, found = [], {}
    for detail in error.errors(include_url=False)[:_MOST_ERRORS]:
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, PlanError):
            raised += [_placed(e, detail["loc"], value, schema) for e in getattr(own, "errors", ()) or (own,)]
        else:
            problem = _problem(detail["type"], detail["loc"], value, schema)
            if problem is not None:
                found.setdefault(problem.where, problem)
    # of a union's branches, the one in which validation got furthest gives the best error
    deepest = [e for path, e in found.items() if not any(other.startswith(f"{path}.") for other in found)]
    return SpecError.of([_located(e, locations) for e in (*deepest, *raised)], what)


def _placed(error: PlanError, loc: tuple[Any, ...], value: Any, schema: dict[str, Any]) -> PlanError:
    """Add the key to an error without a place, which is of the checked value."""
    if error.where is not None:
        return error
    path = _key(loc, value, schema).path
    return SpecError(f"{path} {error.what}", where=path, fix=error.fix)


def _located(error: PlanError, locations: Mapping[str, Where]) -> SpecError:
    where = error.where if isinstance(error.where, Where) else locate(locations, error.where or "")
    return SpecError(error.what, where=where, fix=error.fix)


def _problem(kind: str, loc: tuple[Any, ...], value: Any, schema: dict[str, Any]) -> SpecError | None:
    if loc and loc[-1] == "[key]":
        at = _key(loc[:-2], value, schema)
        if at.key_names:
            return _unknown_key(at, loc[-2])
        what, fix = f"{at.path}: the key {describe_value(loc[-2])} must be a name", "put the key in quotes"
        return SpecError(what, where=join(at.path, loc[-2]), fix=fix)
    if kind in _UNKNOWN_KEY:
        return _unknown_key(_key(loc[:-1], value, schema), loc[-1])
    if kind == "missing" and isinstance(_key(loc[:-1], value, schema).value, Mapping):
        return _missing_key(_key(loc[:-1], value, schema), loc[-1])
    return _wrong_value(_key(loc, value, schema))


def _key(loc: tuple[Any, ...], value: Any, schema: dict[str, Any]) -> _Key:
    """Return the key at ``loc``, in which pydantic also puts the branches of unions."""
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
    """Return the schemas of which one must match."""
    if "$ref" in node:
        return [schema["$defs"][node["$ref"].rpartition("/")[2]]]
    return [option for branch in node["anyOf"] for option in _options(branch, schema)] if "anyOf" in node else [node]


def _unknown_key(at: _Key, name: object) -> SpecError:
    known = [*at.properties, *at.key_names]
    nearest = _nearest(name, known)
    hint = f"did you mean '{nearest}'?" if nearest else f"known keys: {', '.join(known)}"
    inside = f" in {at.path}" if at.path else ""
    return SpecError(f"unknown key '{shorten(name, 100)}'{inside}", where=join(at.path, name), fix=hint)


def _missing_key(at: _Key, name: str) -> SpecError | None:
    unknown = [given for given in at.value if given not in at.properties]
    if any(_nearest(given, at.properties) == name for given in unknown[:_MOST_ERRORS]):
        return None  # it is there, misspelt, and the error of the unknown key says so
    examples = " or ".join(f"`{flow({name: example})}`" for example in at.properties[name]["examples"])
    path = join(at.path, name)
    return SpecError(f"{path} is missing", where=path, fix=f"add {examples}")


def _unquoted(at: _Key, words: list[str]) -> bool:
    """Return whether the value would have an allowed type without the quotes around it."""
    if not isinstance(at.value, str) or not _UNQUOTED.fullmatch(at.value):
        return False
    kinds = (
        {"boolean"} if at.value in ("true", "false") else {"number"} | ({"integer"} if "." not in at.value else set())
    )
    return at.value in words or any(option.get("type") in kinds for option in at.options)


def _wrong_value(at: _Key) -> SpecError:
    words = [str(c) for o in at.options for c in o.get("enum", [o["const"]] if "const" in o else [])]
    kinds = [o for o in at.options if "enum" not in o and "const" not in o and o["type"] != "null"]
    if any(o.get("type") == "null" for o in at.options):
        words.append("null")
    if kinds:
        what, fix = _out_of_range(at, kinds) or _wrong_type(at, kinds[0], words)
    else:
        error = no_choice(at.value, words)
        what, fix = f"{at.path} {error.what}", error.fix
    return SpecError(what, where=at.path, fix=f"write {at.value}, without quotes" if _unquoted(at, words) else fix)


def wrong(path: str, words: str, fix: str) -> SpecError:
    """Return an error of the key ``path``; its text begins with the path."""
    return SpecError(f"{path}{words}", where=path, fix=fix)


def not_read(path: str, rule: str) -> SpecError:
    """Return the error that the chosen kind, or rule, does not read the key ``path``."""
    return wrong(path, f" is not for {rule}, which does not read it", "remove it")


def no_choice(value: Any, words: Iterable[str], more: str = "") -> SpecError:
    """Return the error that ``value`` is none of ``words``; ``more``: further allowed values."""
    nearest = _nearest(value, words)
    hint = f"did you mean '{nearest}'? " if nearest else ""
    return SpecError(f"cannot be {describe_value(value)}", fix=f"{hint}choose one of: {', '.join(words)}{more}")


def _out_of_range(at: _Key, kinds: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Return (problem, fix) for a value of the right type that is out of range."""
    for option in kinds:
        kind, value, allowed = option["type"], at.value, _allowed(option, at.value)
        if (wrong := _wrong_length(at, option)) is not None:
            return wrong
        is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_finite:
            continue
        if kind == "number" or (kind == "integer" and int(value) == value):
            return f"{at.path} is {_digits(value)}, it must be {allowed}", _in_range(option, value, allowed)
    return None


def _wrong_length(at: _Key, option: dict[str, Any]) -> tuple[str, str] | None:
    kind, value = option["type"], at.value
    if kind == "array" and isinstance(value, (list, tuple)) and "minItems" in option:
        length = option["minItems"]
        return f"{at.path} must have {length} items, not {len(value)}", f"give {length} items"
    most = option.get({"array": "maxItems", "object": "maxProperties"}.get(kind, ""))
    if most is not None and isinstance(value, (list, tuple, Mapping)) and len(value) > most:
        return f"{at.path} has {len(value)} entries, it may have {most}", f"give {most} or fewer"
    return None


def _in_range(option: dict[str, Any], value: float, allowed: str) -> str:
    if option["type"] != "integer":
        return f"choose a number {allowed}"
    is_more = value > option.get("maximum", value)
    return f"set it to {option['maximum']} or less" if is_more else f"set it to {option['minimum']} or more"


def _digits(value: float) -> str:
    """Return a number as text; of a very long one only its length."""
    if not isinstance(value, int):
        return f"{value:g}"
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


def _wrong_type(at: _Key, option: dict[str, Any], words: list[str]) -> tuple[str, str]:
    expected, fix = _TYPES[option["type"]]
    expected, fix = " or ".join([expected, *words]), ", or ".join([fix.format(allowed=_allowed(option)), *words])
    return f"{at.path or 'the spec'} must be {expected}, not {describe_value(at.value)}", fix


def _allowed(option: dict[str, Any], value: Any = None) -> str:
    """Return the range of an option. The maximum appears only in an error about exceeding it."""
    is_more = isinstance(value, (int, float)) and "maximum" in option and value > option["maximum"]
    names = [name for name in _LIMITS if name in option and (name == "maximum") <= is_more]
    return " and ".join(f"{_LIMITS[name]} {_digits(option[name])}" for name in names)


def _nearest(word: object, known: Iterable[str]) -> str | None:
    text = word if isinstance(word, str) else _plain(word)
    if len(text) > 100:
        return None
    return next(iter(difflib.get_close_matches(text, known, n=1, cutoff=0.5)), None)


def flow(value: Mapping[str, Any]) -> str:
    """Return a mapping on one line of YAML: ``mesh: {tp: 2, pp: 2}``."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()[1:-1]


def describe_value(value: Any) -> str:
    """Return the name of a value in errors: ``the string 'two'``, ``a list``, ``nothing``."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        return f"the string '{shorten(value, 100)}'"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"the list [{', '.join(map(_plain, value[:20]))}{', …' if len(value) > 20 else ''}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _plain(value) if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return _digits(value)
    return shorten(repr(value) if isinstance(value, (str, list, dict)) else value, 100)
