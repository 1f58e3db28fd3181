"""zero_bubble_v: two chunks a rank, folded into a v, in the order in which work comes (ZB-V of Qi et al. 2024).

    stages    of 4 ranks  0 1 2 3      a microbatch comes down the first row and back along the second: its loss is
                          7 6 5 4      on rank 0, and no rank waits for a message at the turn
    next      of work that can start, the rank's preference; if none can: the W that has waited longest
    held      of a rank, at most pp whole microbatches: one is admitted when both its chunks, to their W, have a place

All ranks are run in the order of time. The best preference of each rank depends on the costs: the variants of
_PREFERENCES are tried on a few microbatches, and the shortest run is taken. (Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory", section 4: memory as 1f1b's. Their orders repeat one pattern, which takes F, B and W to cost about
the same; these follow the costs of each stage.)

    equal F, B, W of a chunk    a rank is idle for (pp − 1)·F, as long as the first microbatch takes to the last rank:
                                no order is shorter; zero_bubble, with an F of two chunks, idles 2·(pp − 1)·F
                                (up to 4·pp microbatches; of more a little longer)
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from planner.fold import V, rank_of, stages_of
from planner.pipeline.actions import Action, Order
from planner.pipeline.zero_bubble import StageCosts

_Work = tuple[str, int]  # kind of action, chunk
_WORK: tuple[_Work, ...] = (("B", 0), ("B", 1), ("F", 0), ("F", 1))
_FORWARDS: tuple[_Work, ...] = (("F", 1), ("F", 0), ("B", 0), ("B", 1))
_PREFERENCES: tuple[tuple[tuple[_Work, ...], tuple[_Work, ...]], ...] = (  # of the first half of the ranks, of the rest
    (_WORK, (("B", 1), ("F", 1), ("F", 0), ("B", 0))),
    (_WORK, _FORWARDS),
    (_WORK, (("B", 1), ("F", 1), ("B", 0), ("F", 0))),
    (_WORK, (("F", 1), ("B", 1), ("B", 0), ("F", 0))),
    ((("B", 1), ("F", 1), ("F", 0), ("B", 0)), _FORWARDS),
    (_FORWARDS, _FORWARDS),
)
_SHARES = (0.5, 0.0)  # of a W, that must fit into a wait


class _Way(NamedTuple):
    """One way to choose: the preferences of the ranks, and how much of a W must fit into a wait."""

    preferences: tuple[tuple[_Work, ...], tuple[_Work, ...]]
    share: float


def folded_orders(pp: int, num_microbatches: int, costs: StageCosts) -> tuple[Order, ...]:
    """Of each of ``pp`` ranks its F, B and W; ``costs``: of each of the 2·pp stages."""
    return _orders(pp, num_microbatches, *(tuple(side) for side in costs.ticks))


@lru_cache(maxsize=256)
def _orders(
    pp: int, num_microbatches: int, forward: tuple[int, ...], backward: tuple[int, ...], weights: tuple[int, ...]
) -> tuple[Order, ...]:
    costs = {"F": forward, "B": backward, "W": weights}
    ways = [_Way(preferences, share) for preferences in _PREFERENCES for share in _SHARES]
    few = min(num_microbatches, 4 * pp)
    tried = [_Ranks(pp, few, costs, way).run() for way in ways]
    best = min(range(len(ways)), key=lambda at: max(tried[at].free))
    found = tried[best] if few == num_microbatches else _Ranks(pp, num_microbatches, costs, ways[best]).run()
    return tuple(map(tuple, found.done))


class _Ranks:
    """Owns how far each rank is, when each action ended, and when each rank next looks for work."""

    def __init__(self, pp: int, num_microbatches: int, costs: dict[str, tuple[int, ...]], way: _Way) -> None:
        self.pp, self.num_microbatches, self.costs, self.share = pp, num_microbatches, costs, way.share
        self.last = 2 * pp - 1
        self.stages = [stages_of(rank, pp, 2 * pp, V) for rank in range(pp)]
        self.preferred = [way.preferences[rank >= max(1, pp // 2)] for rank in range(pp)]
        self.begun: list[dict[_Work, int]] = [dict.fromkeys(_WORK, 0) for _ in range(pp)]
        self.places = [2 * pp] * pp  # places for saved tensors of one microbatch on one chunk, not yet reserved
        self.free = [0] * pp
        self.waiting: list[deque[Action]] = [deque() for _ in range(pp)]
        self.done: list[list[Action]] = [[] for _ in range(pp)]
        self.ends: dict[tuple[str, int, int], int] = {}
        self.looks: list[int | None] = [0] * pp  # None: when a neighbour has begun something
        self.agenda = [(0, rank) for rank in range(pp)]

    def run(self) -> _Ranks:
        while self.agenda:
            now, rank = heappop(self.agenda)
            if self.looks[rank] != now:
                continue  # the rank has looked earlier, for earlier work
            self.looks[rank] = None
            ready = {work: at for work in self.preferred[rank] if (at := self._ready(rank, work)) is not None}
            work = next((work for work, at in ready.items() if at <= now), None)
            soonest = min(ready.values(), default=None)
            if work is not None:
                self._start(rank, Action(work[0], self.begun[rank][work], work[1]), now)
                self.begun[rank][work] += 1
            elif self.waiting[rank] and (soonest is None or soonest - now >= self.share * self._weights(rank)):
                self._start(rank, self.waiting[rank].popleft(), now)
            elif soonest is not None:
                self._look(rank, soonest)
        all_ran = all(count == self.num_microbatches for begun in self.begun for count in begun.values())
        assert all_ran, "a microbatch that is let in has a place on every chunk"
        return self

    def _ready(self, rank: int, work: _Work) -> int | None:
        """When the rank's next microbatch of ``work`` can start; None while that is unknown, or if it has no place."""
        (kind, chunk), microbatch = work, self.begun[rank][work]
        stage = self.stages[rank][chunk]
        if microbatch == self.num_microbatches:
            return None
        if kind == "F":
            if chunk == 0 and self.places[rank] < 2:
                return None
            return self.ends.get(("F", microbatch, stage - 1)) if stage else 0
        end = self.ends.get(("F", microbatch, stage))
        return end if end is None or stage == self.last else self.ends.get(("B", microbatch, stage + 1))

    def _start(self, rank: int, action: Action, now: int) -> None:
        kind, microbatch, chunk = action
        stage = self.stages[rank][chunk]
        self.free[rank] = end = now + self.costs[kind][stage]
        self.done[rank].append(action)
        self._look(rank, end)
        if kind == "W":
            self.places[rank] += 1
            return
        self.ends[kind, microbatch, stage] = end
        if kind == "B":
            self.waiting[rank].append(action._replace(kind="W"))
        elif chunk == 0:
            self.places[rank] -= 2
        waits = stage + (1 if kind == "F" else -1)
        if 0 <= waits <= self.last:
            neighbour = rank_of(waits, self.pp, V)
            self._look(neighbour, max(end, self.free[neighbour]))

    def _look(self, rank: int, at: int) -> None:
        """Look for work at ``at``, unless the rank looks sooner."""
        sooner = self.looks[rank]
        if sooner is None or at < sooner:
            self.looks[rank] = at
            heappush(self.agenda, (at, rank))

    def _weights(self, rank: int) -> int:
        return self.costs["W"][self.stages[rank][self.waiting[rank][0].chunk]]
