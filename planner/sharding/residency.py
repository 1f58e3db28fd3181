"""The weights that are gathered on a rank (ZeRO-3), move by move: the plan counts the moves, the runtime runs them.

need({3}, then {4})     gather 3 and 4 (4 while 3 computes); free every other unit
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

Unit = tuple[int, int]  # (buffer of a rank, bucket in it)


class Moves(NamedTuple):
    """Units in the order in which all ranks move them."""

    freed: tuple[Unit, ...] = ()
    gathered: tuple[Unit, ...] = ()


class Residency:
    """Owns the set of units that are ``whole`` (gathered), and of those still ``coming``. ``reshards``: free units that
    are not needed, except ``kept`` ones; otherwise free all at the end of a step.
    """

    def __init__(self, *, reshards: bool, kept: Collection[Unit] = ()) -> None:
        self.reshards, self.kept = reshards, frozenset(kept)
        self.whole: dict[Unit, None] = {}
        self.coming: set[Unit] = set()

    def need(self, units: Iterable[Unit], ahead: Iterable[Unit] = ()) -> Moves:
        """Return the moves before ``units`` are read; ``ahead``: read next."""
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
        """Note that the gathers of ``units`` have finished."""
        self.coming.difference_update(units)

    def end(self) -> Moves:
        """Return the moves that free all units, before weights change or after their last use."""
        freed, self.whole, self.coming = tuple(self.whole), {}, set()
        return Moves(freed)
