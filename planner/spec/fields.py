"""Read plain values into frozen dataclasses: every field of a section carries the reader that checks its value.

A reader takes a Cursor (a value and its dotted path in the spec) and returns the checked value, or raises one SpecError
that says what is wrong, on which line, and how to fix it. ``key(reader, default)`` declares a field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError, Where
from planner.spec.lines import EXPONENT, join

AUTO = "auto"
MISSING: Any = dataclasses.MISSING


@dataclass(frozen=True)
class Cursor:
    """A value of the spec with its dotted ``path``; ``locations`` has the lines where it came from a file."""

    value: Any
    path: str
    locations: Mapping[str, Where]

    def child(self, key: object) -> Cursor:
        return Cursor(self.value[key], join(self.path, key), self.locations)

    def error(self, what: str, fix: str = "", *, path: str | None = None) -> SpecError:
        return SpecError(what, where=locate(self.locations, self.path if path is None else path), fix=fix)

    def wrong_type(self, expected: str, fix: str = "") -> SpecError:
        return self.error(f"{self.path or 'the spec'} must be {expected}, not {describe_value(self.value)}", fix)


Reader = Callable[[Cursor], Any]


def locate(locations: Mapping[str, Where], path: str) -> Where:
    """The place of ``path``, or of the nearest key around it; for a spec that was a dict, the dotted path itself."""
    if not locations:
        return Where(module=path or "the spec")
    while path not in locations:
        path = path.rpartition(".")[0]
    return locations[path]


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


def key(
    reader: Reader, default: Any = MISSING, *, name: str | None = None, factory: Any = MISSING, example: str = ""
) -> Any:
    """A dataclass field read by ``reader``; ``name`` is its key in the spec where Python's name has to differ.

    ``example`` is what the error shows where a required key is missing.
    """
    metadata = {"read": reader, "key": name, "example": example}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def key_of(spec_field: dataclasses.Field[Any]) -> str:
    return spec_field.metadata.get("key") or spec_field.name


def spec_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if "read" in f.metadata]


def read_section(cls: type, cursor: Cursor) -> dict[str, Any]:
    """The checked keyword arguments of ``cls``. Raises SpecError for unknown, missing or bad keys."""
    if not isinstance(cursor.value, Mapping):
        raise cursor.wrong_type("a mapping", "write `key: value` pairs, or remove the key")
    fields = {key_of(f): f for f in spec_fields(cls)}
    for name in cursor.value:
        if name not in fields:
            raise _unknown_key(cursor, name, fields)
    values = {}
    for name, spec_field in fields.items():
        if name in cursor.value:
            values[spec_field.name] = spec_field.metadata["read"](cursor.child(name))
        elif spec_field.default is MISSING and spec_field.default_factory is MISSING:
            raise missing_key(cursor, name, spec_field.metadata["example"])
    return values


def missing_key(cursor: Cursor, name: str, example: str) -> SpecError:
    path = join(cursor.path, name)
    return cursor.error(f"{path} is missing", f"add `{example}`", path=path)


def _unknown_key(cursor: Cursor, name: object, known: Iterable[str]) -> SpecError:
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"known keys: {_listed(known)}"
    inside = f" in {cursor.path}" if cursor.path else ""
    return cursor.error(f"unknown key '{name}'{inside}", hint, path=join(cursor.path, name))


def section(cls: type) -> Reader:
    return lambda cursor: cls(**read_section(cls, cursor))


def integer(minimum: int = 1, *, auto: bool = False, optional: bool = False) -> Reader:
    """A whole number of at least ``minimum``; ``auto`` and null only where allowed."""
    expected = f"a whole number{' or auto' if auto else ''}"

    def read(cursor: Cursor) -> int | str | None:
        if (optional and cursor.value is None) or (auto and cursor.value == AUTO):
            return cursor.value
        number = _as_number(cursor.value)
        if number is None or not float(number).is_integer():
            raise cursor.wrong_type(
                expected, f"write a whole number of at least {minimum}{', or auto' if auto else ''}"
            )
        if number < minimum:
            raise cursor.error(
                f"{cursor.path} is {int(number)}, it must be at least {minimum}", f"set it to {minimum} or more"
            )
        return int(number)

    return read


def number(
    *, minimum: float = -math.inf, above: float = -math.inf, below: float = math.inf, optional: bool = False
) -> Reader:
    """A finite number with ``minimum`` <= it, ``above`` < it < ``below``."""
    limits = [("at least", minimum), ("more than", above), ("less than", below)]
    allowed = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))

    def read(cursor: Cursor) -> float | None:
        if optional and cursor.value is None:
            return None
        value = _as_number(cursor.value)
        if value is None:
            raise cursor.wrong_type(
                f"a number{' or null' if optional else ''}",
                f"write a number {allowed}, without quotes".replace("  ", " "),
            )
        if not (value >= minimum and above < value < below):
            raise cursor.error(f"{cursor.path} is {value:g}, it must be {allowed}", f"choose a number {allowed}")
        return float(value)

    return read


def _as_number(value: Any) -> float | int | None:
    """The finite number that ``value`` is. YAML 1.1 readers leave `1e-8` a string: read exponents from strings too."""
    if isinstance(value, str):
        return _as_number(float(value)) if EXPONENT.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def boolean(cursor: Cursor) -> bool:
    if not isinstance(cursor.value, bool):
        raise cursor.wrong_type("true or false", "write true or false, without quotes")
    return cursor.value


def text(*, optional: bool = False) -> Reader:
    def read(cursor: Cursor) -> str | None:
        if optional and cursor.value is None:
            return None
        if not isinstance(cursor.value, str) or not cursor.value:
            raise cursor.wrong_type("a string", "write a word, in quotes where YAML would read it as something else")
        return cursor.value

    return read


def choice(*allowed: Any, optional: bool = False) -> Reader:
    """One of ``allowed``. A Python None stands for the word none; a torch dtype for its name."""

    def read(cursor: Cursor) -> Any:
        value = cursor.value
        if value is None and (optional or "none" in allowed):
            return None if optional else "none"
        name = str(value).removeprefix("torch.")
        for option in allowed:
            if str(option) == name and not isinstance(value, bool):
                return option
        nearest = difflib.get_close_matches(name, map(str, allowed), n=1, cutoff=0.5)
        hint = f"did you mean '{nearest[0]}'? " if nearest else ""
        raise cursor.error(
            f"{cursor.path} cannot be {describe_value(value)}", f"{hint}choose one of: {_listed(allowed)}"
        )

    return read


def list_of(reader: Reader, *, length: int | None = None, auto: bool = False) -> Reader:
    """A list (of ``length``) whose items ``reader`` reads, as a tuple."""

    def read(cursor: Cursor) -> Any:
        if auto and cursor.value == AUTO:
            return AUTO
        if not isinstance(cursor.value, (list, tuple)):
            raise cursor.wrong_type(f"a list{' or auto' if auto else ''}", "write a list: [a, b]")
        if length is not None and len(cursor.value) != length:
            raise cursor.error(
                f"{cursor.path} must have {length} items, not {len(cursor.value)}", f"give {length} items"
            )
        return tuple(reader(cursor.child(index)) for index in range(len(cursor.value)))

    return read


def mapping_of(reader: Reader) -> Reader:
    """A mapping from strings to what ``reader`` reads."""

    def read(cursor: Cursor) -> dict[str, Any]:
        if not isinstance(cursor.value, Mapping):
            raise cursor.wrong_type("a mapping", "write `name: value` pairs")
        for name in cursor.value:
            if not isinstance(name, str) or not name:
                raise cursor.error(
                    f"{cursor.path}: the key {describe_value(name)} must be a name", "put the key in quotes"
                )
        return {name: reader(cursor.child(name)) for name in cursor.value}

    return read


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)
