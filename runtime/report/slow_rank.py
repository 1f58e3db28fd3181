"""The rank that the others wait for, from the seconds that each rank works in the actions of a step.

Ranks that share a layer (tp, cp) wait inside of its collectives, which count as work: they have one figure and are
named together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median_low

SLOWER = 2.0  # than the median of those with the same work, to be named
SLOWER_STAGE = 3.0  # than the median of the other stages, if no replica has the same work


@dataclass(frozen=True, slots=True)
class SlowRank:
    """``ranks`` work ``factor`` times as long in each step as others with their work: ``seconds`` more."""

    ranks: tuple[int, ...]
    factor: float
    seconds: float

    def __str__(self) -> str:
        named = f"rank {self.ranks[0]} is" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))} are"
        return f"{named} {self.factor:.1f}× slower: costs {self.seconds:.2g} s per step"


def slowest(working: Sequence[float], places: Sequence[tuple[int, int]]) -> SlowRank | None:
    """The ranks that cost the others most; None if all are about alike, or a figure is unknown (0).

    ``working``: seconds of each rank. ``places``: coordinates (pp, dp) of each rank. Replicas of one pipeline stage
    have the same work and are compared with each other. A stage without replicas is compared with all other stages,
    which differ by nature, so there the threshold is higher.
    """
    if not working or not all(working):
        return None
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    seconds = {place: mean(working[rank] for rank in ranks) for place, ranks in members.items()}
    worst: dict[int, tuple[int, int]] = {}  # of each stage: what the others are compared with is no less
    for place in seconds:
        worst[place[0]] = max(worst.get(place[0], place), place, key=seconds.__getitem__)
    found = [slow for place in worst.values() if (slow := _slow(place, members[place], seconds)) is not None]
    return max(found, key=lambda slow: slow.seconds, default=None)


def _slow(place: tuple[int, int], ranks: list[int], seconds: dict[tuple[int, int], float]) -> SlowRank | None:
    others = {other: spent for other, spent in seconds.items() if other != place}
    if not others:
        return None
    replicas = [spent for (stage, _), spent in others.items() if stage == place[0]]
    usual = median_low(replicas or others.values())
    factor = seconds[place] / usual
    if factor < (SLOWER if replicas else SLOWER_STAGE):
        return None
    return SlowRank(tuple(ranks), factor, seconds[place] - usual)
