"""What names the numbers of one op that draws (passes.rng.places)."""

from __future__ import annotations

from dataclasses import dataclass

from passes.types.types import Placement

Run = tuple[int, int, int]  # a dim, the distance of two sequences along it, and their number


@dataclass(frozen=True, slots=True)
class Draw:
    """``shape``: of the value of one full microbatch. ``batch``: (dim, step, number) of the sequences in it; None
    if there is one, or (not ``by_sample``) all share the value. ``cut``: how ranks of cp share it, in 2·cp parts.
    """

    site: int
    shape: tuple[int, ...]
    batch: Run | None
    by_sample: bool
    cut: Placement | None = None
