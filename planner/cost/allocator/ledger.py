"""The bytes that live while a stage runs, and, if they are asked for, the births and deaths that they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Held(NamedTuple):
    """What holds bytes: a ``memory`` of the trace, a ``hidden`` saved tensor of a call (its number, and which one), a
    ``gradient`` by number, ``inside`` of a call or a rerun.
    """

    kind: str
    number: int
    which: int = 0


class Event(NamedTuple):
    """A birth of ``bytes``, or a death."""

    held: Held
    bytes: int
    is_birth: bool


class Ledger:
    """Owns: bytes that ``live``. ``events``: every change in its order, if ``records``; else None."""

    def __init__(self, live: int = 0, *, records: bool = False) -> None:
        self.live = live
        self.events: list[Event] | None = [] if records else None

    def take(self, held: Held, size: int) -> None:
        self.live += size
        if self.events is not None and size:
            self.events.append(Event(held, size, True))

    def give(self, held: Held, size: int) -> None:
        self.live -= size
        if self.events is not None and size:
            self.events.append(Event(held, size, False))

    def take_hidden(self, at: int, sizes: Iterable[int]) -> None:
        for which, size in enumerate(sizes):
            self.take(Held("hidden", at, which), size)

    def give_hidden(self, at: int, sizes: Iterable[int]) -> None:
        for which, size in enumerate(sizes):
            self.give(Held("hidden", at, which), size)

    @property
    def mark(self) -> int:
        """The place of the next event."""
        return 0 if self.events is None else len(self.events)

    def passing(self, mark: int, at: int, size: int) -> None:
        """``size`` bytes of a call that were born at ``mark``, before its results, and die now."""
        if self.events is not None and size > 0:
            held = Held("inside", at)
            self.events.insert(mark, Event(held, size, True))
            self.events.append(Event(held, size, False))
