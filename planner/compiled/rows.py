"""The rows of compilation: each piece, and each call that is not compiled although it might be, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from passes.blocks.places import Places
from passes.errors import require
from planner.compiled.borders import is_worth_telling
from planner.compiled.homes import is_free
from planner.compiled.pieces import Compiled
from planner.decisions import Decisions


@dataclass(frozen=True, slots=True)
class CompiledRow:
    """``ops`` that run as one call on each rank of ``stage``: as the compiled ``function``, which equal pieces share.

    With a ``reason`` against compiling, they run one by one, and ``function`` is -1. ``block``: that of the first of
    them;
    ``where``: its module and the user's line.
    """

    block: str
    stage: int
    where: str
    ops: str
    function: int
    reason: str = ""

    def __post_init__(self) -> None:
        require((self.function < 0) == bool(self.reason), f"{self.ops} of stage {self.stage} is compiled, and is not")


def rows_of(compiled: Compiled, decisions: Decisions, places: Places) -> tuple[CompiledRow, ...]:
    """Pieces first, then calls that run op by op though they are neither products nor collectives."""
    return (*_of_pieces(compiled, decisions, places), *_of_eager(compiled, decisions, places))


def _of_pieces(compiled: Compiled, decisions: Decisions, places: Places) -> Iterator[CompiledRow]:
    for piece in compiled.pieces:
        nodes = [decisions.program.node(name) for name in piece.nodes]
        first = next(node for node in nodes if not is_free(node))
        ops = ", ".join(_name(node) for node in nodes if not is_free(node))
        yield CompiledRow(places.block(first), piece.stage, places.text(first), ops, piece.function)


def _of_eager(compiled: Compiled, decisions: Decisions, places: Places) -> Iterator[CompiledRow]:
    """One row for all calls of a line that have one reason."""
    lines: dict[tuple[str, int, str, str], list[str]] = {}
    for stage, name, reason in compiled.eager:
        node = decisions.program.node(name)
        if is_worth_telling(reason) and not is_free(node):
            lines.setdefault((places.block(node), stage, places.text(node), reason), []).append(_name(node))
    for (block, stage, where, reason), ops in lines.items():
        yield CompiledRow(block, stage, where, ", ".join(ops), -1, reason)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
