"""Rows to and from JSON values, by the types of their fields.

encode: dataclass -> dict, tuple -> list.        decode: the reverse, and every key and type is checked.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from passes.errors import PlanError


def encode(value: Any) -> Any:
    """Plain JSON values of a row, a tuple of rows, or a plain value."""
    if (names := _names(type(value))) is not None:
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (tuple, list)) else value


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields that a row of this kind is stored with; None if it is no row."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare) if dataclasses.is_dataclass(kind) else None


def decode(kind: Any, value: Any, path: str) -> Any:
    """The value of type ``kind`` that ``encode`` wrote. Raises PlanError with the ``path`` of a value that does not
    fit.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_row(kind, value, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = next(a for a in arguments if a is not NoneType)
        return None if value is None else decode(inner, value, path)
    if origin is tuple:
        return _decode_tuple(arguments, value, path)
    if origin is dict or kind is dict:
        return _expect(value, dict, path)
    if origin is Literal:
        if value not in arguments:
            what = f"{path} must be one of {', '.join(map(str, arguments))}, not {value!r}"
            raise _of_another_version(what)
        return value
    if kind is float:
        return float(_expect(value, (int, float), path))
    return _expect(value, kind, path)


def _decode_row(kind: type, value: Any, path: str) -> Any:
    _expect(value, dict, path)
    hints = _hints(kind)
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    for name in (*sorted(required - value.keys()), *sorted(value.keys() - hints.keys())):
        problem = "is missing" if name in required else "is unknown"
        raise _of_another_version(f"{path}.{name} {problem}")
    return kind(**{name: decode(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _decode_tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _expect(value, list, path)
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        raise _of_another_version(f"{path} must have {len(kinds)} items, not {len(value)}")
    return tuple(
        decode(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _expect(value: Any, kind: Any, path: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else "number"
        raise _of_another_version(f"{path} must be of type {names}, not {type(value).__name__}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The fields that are saved, with their types: those that compare."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.compare}


def to_text(values: dict[str, Any]) -> str:
    """JSON with one line for each row of each table, so that a person reads it and a diff shows rows."""
    parts = []
    for name, value in values.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"    {_line(row)}" for row in value)
            parts.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {_line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _of_another_version(what: str) -> PlanError:
    return PlanError(f"not a plan of this version: {what}", fix="save the plan again with this version")
