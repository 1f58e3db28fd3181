"""Draw and shrink flat choices: each field has a table row of options, the simplest first.

draw      every field by itself: the simplest with a given chance, else any. A field that is added changes no other
simpler   every way to replace one field's option by one that stands before it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

Options = Mapping[str, tuple[Any, ...]]
Choices = dict[str, Any]


def draw(options: Options, seed: int | str, *, simplest: float = 0.5) -> Choices:
    """``simplest``: the chance that a field keeps its first option, from 0 to 1."""
    return {name: _drawn(values, Random(f"{seed}/{name}"), simplest) for name, values in options.items()}


def _drawn(values: tuple[Any, ...], random: Random, simplest: float) -> Any:
    return values[0] if random.random() < simplest else random.choice(values)


def simpler(chosen: Choices, options: Options) -> Iterator[Choices]:
    """One change at a time, the largest first: a field's first option, then its others from simple to complex."""
    positions = {name: options[name].index(value) for name, value in chosen.items() if name in options}
    most = max(positions.values(), default=0)
    for at in range(most):
        for name, position in positions.items():
            if at < position:
                yield {**chosen, name: options[name][at]}


def told(chosen: Choices, options: Options) -> str:
    """The fields that are not the simplest, as ``name value``."""
    names = [f"{n} {chosen[n]}" for n, values in options.items() if n in chosen and chosen[n] != values[0]]
    return ", ".join(names) or "only defaults"


def listed(values: dict[str, Any], options: Options) -> Choices:
    """The options that were written. Raises ValueError if any is missing or unknown."""
    found = {name: tuple(v) if isinstance(v := values[name], list) else v for name in options}
    if values.keys() != options.keys() or any(found[name] not in options[name] for name in options):
        raise ValueError
    return found
