"""The pp rank of each stage: how the row of stages is folded onto the ranks.

    loop    0 1 2 3            v    0 1 2 3
            4 5 6 7                 7 6 5 4

Columns are ranks; chunk c of a rank is its stage in row c. A loop begins each row at rank 0. A v turns around at the
last rank: both stages at the turn are on one rank and exchange no message. With two chunks, rank 0 has the first and
the last stage, so it runs both embedding and loss. (The v: Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", section 4.)
"""

from typing import Literal

Fold = Literal["loop", "v"]
LOOP: Fold = "loop"
V: Fold = "v"


def stage_of(rank: int, chunk: int, pp: int, fold: Fold) -> int:
    """Return the stage of chunk ``chunk`` on pp rank ``rank``."""
    return chunk * pp + _turned(rank, chunk, pp, fold)


def rank_of(stage: int, pp: int, fold: Fold) -> int:
    """Return the pp rank that runs ``stage``."""
    return _turned(stage % pp, stage // pp, pp, fold)


def stages_of(rank: int, pp: int, num_stages: int, fold: Fold) -> tuple[int, ...]:
    """Return the stages of pp rank ``rank``, chunk by chunk."""
    return tuple(stage_of(rank, chunk, pp, fold) for chunk in range(-(-num_stages // pp)))


def _turned(place: int, chunk: int, pp: int, fold: Fold) -> int:
    return pp - 1 - place if fold == V and chunk % 2 else place
