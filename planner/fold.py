"""Which rank runs which stage: how the row of stages is folded onto the ranks.

    loop    0 1 2 3            v    0 1 2 3
            4 5 6 7                 7 6 5 4

Chunk c of a rank is a stage of row c. A loop begins each row at rank 0 again. A v turns around at the last rank, so
both stages at the turn are on one rank, which hands its values over without a message, and with two chunks the first
stage and the last are on rank 0: it runs both embedding and loss. (The v: Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory", section 4.)
"""

from typing import Literal

Fold = Literal["loop", "v"]
LOOP: Fold = "loop"
V: Fold = "v"


def stage_of(rank: int, chunk: int, pp: int, fold: Fold) -> int:
    """The stage that chunk ``chunk`` of pp rank ``rank`` is."""
    return chunk * pp + _turned(rank, chunk, pp, fold)


def rank_of(stage: int, pp: int, fold: Fold) -> int:
    """The pp rank that runs ``stage``."""
    return _turned(stage % pp, stage // pp, pp, fold)


def stages_of(rank: int, pp: int, num_stages: int, fold: Fold) -> tuple[int, ...]:
    """The stages of pp rank ``rank``, chunk by chunk."""
    return tuple(stage_of(rank, chunk, pp, fold) for chunk in range(-(-num_stages // pp)))


def _turned(place: int, chunk: int, pp: int, fold: Fold) -> int:
    return pp - 1 - place if fold == V and chunk % 2 else place
