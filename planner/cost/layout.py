"""One layout: the choices that a search varies and a plan fixes."""

from __future__ import annotations

from dataclasses import dataclass

from planner.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Layout:
    """``micro``: sequences of a microbatch; ``num_microbatches`` of one dp rank in a step. ``schedule``: its kind.

    ``recompute``: none, full or selective, for all blocks alike. ``sizes``: blocks of each stage.
    ``zero``: what the ranks of dp keep shards of; ``reshards``: weights are freed after each use.
    """

    mesh: Mesh
    micro: int
    num_microbatches: int
    sequence_parallel: bool
    recompute: str
    schedule: str
    sizes: tuple[int, ...]
    zero: int = 1
    reshards: bool = True
