"""Whether a value that was read is of the type that a field says."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def checked(cls: type[Record], given: Mapping[str, Any]) -> Record:
    """The dataclass of these fields. Raises TypeError for a value of another type than the field's."""
    kinds = _kinds(cls)
    for name, value in given.items():
        if not fits(value, kinds[name]):
            raise TypeError(f"{cls.__name__}.{name} must not be a {type(value).__name__}")
    return cls(**given)


def fits(value: Any, kind: Any) -> bool:
    """``float`` takes an int; a parameter that is no type of a value here (a callable, say) takes all."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if kind is Any or kind is type(None):
        return kind is Any or value is None
    if kind in (int, float):
        return type(value) is int or type(value) is kind
    if not isinstance(origin or kind, type):
        return True
    return isinstance(value, origin or kind) and _parts_fit(value, origin, parts)


def _parts_fit(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if not parts or origin is type:
        return True
    if isinstance(value, Mapping):
        return all(fits(key, parts[0]) and fits(part, parts[-1]) for key, part in value.items())
    if origin is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return not isinstance(value, (tuple, list, set, frozenset)) or all(fits(part, parts[0]) for part in value)


@cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
