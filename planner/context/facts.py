"""What a cut over cp says of itself: how many ranks, which sequences, what they exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call of the program by which ranks of cp meet: its node, and what its forward does.

    Where what it gathers is not kept but gathered again in the backward: ``way``, the calls from it on that only lay it
    out, and their ``reader``.
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
        """Names of the gathers whose result is not kept for the backward."""
        return frozenset(exchange.node for exchange in self.exchanges if exchange.reader)
