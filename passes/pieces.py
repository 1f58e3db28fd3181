"""Pieces of a stage: the parts of blocks that are recomputed together, and the runs of ops that are compiled.

A CUDA graph holds its own recompute: the captured backward contains the rerun for the tensors that its forward freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.partition.type_changes import TypeChange
from passes.regions import Region, home_of
from passes.types.types import Placement

Key = tuple[str, Placement]  # captured name of a value, and the type in which it is here


@dataclass(frozen=True, slots=True)
class AgainCall:
    """A call of the rerun. ``bytes``: of the freed memory that it restores, for one microbatch; ``flops``, ``moved``:
    its cost.

    ``changed``: if it is not an op but a change of type.
    """

    name: str
    bytes: int
    flops: int
    moved: int
    changed: TypeChange | None = None


@dataclass
class Piece:
    """``nodes``: captured names. ``region``: the captured part of the block that it is; None for a part that is not
    captured.

    ``needed``: for each freed memory, the values in it. ``kept``: values at which the rerun begins, beside inputs from
    outside. ``insides``: captured names of the ops with freed internal tensors. ``overwrites``: of the ops that run
    again because they overwrite an operand. ``again``: calls of the rerun. As memory of the stage's trace
    (planner.saved.trace): ``let_go`` after the forward, ``sources`` held for the rerun.
    """

    index: int
    stage: int
    block: str
    kind: str
    nodes: frozenset[str]
    region: int | None = None
    needed: tuple[frozenset[Key], ...] = ()
    kept: frozenset[Key] = frozenset()
    insides: frozenset[str] = frozenset()
    overwrites: frozenset[str] = frozenset()
    again: tuple[AgainCall, ...] = ()
    let_go: frozenset[int] = frozenset()
    sources: frozenset[int] = frozenset()


class Homes:
    """The homes of one stage's calls and type changes. Owns: captured name → its piece, and → its captured region."""

    def __init__(self, stage: int, pieces: Sequence[Piece], regions: Sequence[Region]) -> None:
        mine = [piece for piece in pieces if piece.stage == stage]
        self._owner = {name: piece for piece in mine for name in sorted(piece.nodes)}
        self._eager = {name: piece for name, piece in self._owner.items() if piece.region is None}
        self._regions = {name: r for r in regions if r.stage == stage and not r.refused for name in sorted(r.nodes)}
        self._captured = {piece.region: piece for piece in mine if piece.region is not None}

    def of_call(self, name: str) -> Piece | None:
        return self._owner.get(name)

    def of_change(self, change: TypeChange) -> Piece | None:
        """A captured region that holds a change keeps it, as lowering does."""
        region = home_of(change, self._regions)
        return home_of(change, self._eager) if region is None else self._captured.get(region.index)


@dataclass(frozen=True)
class CompiledPiece:
    """``nodes``: captured names, in the order of the graph. ``function``: equal for pieces that share one.

    ``leaves``: its results; unread ones too if another piece with the same function needs them.
    ``again``: whether the backward of a recomputed block reruns it.
    """

    index: int
    stage: int
    nodes: tuple[str, ...]
    function: int
    leaves: frozenset[str]
    again: bool = False
