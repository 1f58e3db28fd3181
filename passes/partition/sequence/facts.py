"""The facts of a sharding over cp: the number of ranks, the sequences, the exchanges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective call of the program over cp: its node, and the kind of its forward.

    If the gathered value is not saved but gathered again in the backward: ``way``, the calls after it that only
    rearrange it, and their ``reader``.
    """

    node: str
    kind: str
    way: tuple[str, ...] = ()
    reader: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """``lengths``: tokens of each sequence that is cut, of all ranks. ``exchanges``: in the graph's order."""

    cp: int = 1
    lengths: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    @property
    def gathered_again(self) -> frozenset[str]:
        """Names of the gathers with a result that is not saved for the backward."""
        return frozenset(exchange.node for exchange in self.exchanges if exchange.reader)
