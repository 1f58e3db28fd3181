"""The units of weights that are whole on a rank, move by move: the plan counts the moves, the runtime makes them.

need({3}, then {4})     3 and 4 become whole (4 while 3 computes); every other unit is freed
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

Unit = tuple[int, int]  # (buffer of a rank, bucket in it)


class Moves(NamedTuple):
    """Units in the order in which all ranks move them."""

    freed: tuple[Unit, ...] = ()
    gathered: tuple[Unit, ...] = ()


class Residency:
    """Owns which units are whole, and which of them are still ``coming``. ``reshards``: those that are not needed are
    freed, but for ``kept`` ones; else only at the end of a step.
    """

    def __init__(self, *, reshards: bool, kept: Collection[Unit] = ()) -> None:
        self.reshards, self.kept = reshards, frozenset(kept)
        self.whole: dict[Unit, None] = {}
        self.coming: set[Unit] = set()

    def need(self, units: Iterable[Unit], ahead: Iterable[Unit] = ()) -> Moves:
        """``units`` are read now, ``ahead`` next."""
        wanted = dict.fromkeys((*units, *ahead))
        freed = tuple(u for u in self.whole if u not in wanted and u not in self.kept) if self.reshards else ()
        gathered = tuple(unit for unit in wanted if unit not in self.whole)
        for unit in freed:
            del self.whole[unit]
        self.whole.update(dict.fromkeys(gathered))
        self.coming |= set(gathered)
        self.coming -= set(freed)
        return Moves(freed, gathered)

    def came(self, units: Iterable[Unit]) -> None:
        """These are here: what was sent of them is freed."""
        self.coming.difference_update(units)

    def end(self) -> Moves:
        """The weights change, or nothing reads them for long: all are freed."""
        freed, self.whole, self.coming = tuple(self.whole), {}, set()
        return Moves(freed)
