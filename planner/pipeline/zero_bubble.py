"""The placement of weight gradients: each W fills a wait of its rank (ZB-H1 of Qi et al. 2023, section 2.2).

    F and B   in the order in which they are given
    W         if the next F or B cannot start yet, and before an F that would hold more than is allowed
    held      of a rank, at most ``most_held`` pairs of microbatch and chunk between their F and their W

Ranks run in the order of time, each W decided when its rank is free. How much of a W must fit into a wait is open: it
is tried on a few microbatches, and the shortest run is taken. Of equal stages a rank is idle for (pp − 1)·(F + B − W),
of 1f1b for (pp − 1)·(F + B + W).

zero_bubble_v: two chunks a rank, folded into a v (ZB-V of Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", section 4). Their orders repeat one pattern, which takes F, B and W to cost about the same; these follow the
costs of each stage.

    stages    of 4 ranks  0 1 2 3      a microbatch comes down the first row and back along the second: its loss is
                          7 6 5 4      on rank 0, and no rank waits for a message at the turn
    next      of work that can start, the rank's preference, tried too; if none can: the W that has waited longest
    held      of a rank, at most pp whole microbatches, as 1f1b: one is admitted when both its chunks have a place

Of equal F, B, W of a chunk a rank is idle for (pp − 1)·F, the time of the first microbatch to the last rank: no order
is shorter (up to 4·pp microbatches; of more a little longer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from planner.fold import LOOP, Fold, V, rank_of, stages_of
from planner.pipeline.actions import Action, Order, needs

_TICKS = 1 << 20  # of the longest action: so that the last digits of costs decide nothing
_SHARES = (1.0, 0.5, 0.0)  # of a W, that must fit into a wait; the largest first


class StageCosts(NamedTuple):
    """Of each stage, in any unit of time: forward, backward without the gradients of weights, and those."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]

    @classmethod
    def equal(cls, num_stages: int) -> StageCosts:
        return cls(*([1.0] * num_stages for _ in range(3)))

    @property
    def ticks(self) -> tuple[tuple[int, ...], ...]:
        longest = max(map(max, self)) or 1.0
        return tuple(tuple(round(cost * _TICKS / longest) for cost in costs) for costs in self)


class Tried(NamedTuple):
    """Orders with their W, and the ticks that they take."""

    ticks: int
    orders: tuple[Order, ...]


def with_weights(orders: Sequence[Order], few: Sequence[Order], costs: StageCosts, most_held: int) -> tuple[Order, ...]:
    """``orders`` with their W, as the run of ``few``, those of fewer microbatches or the same, is the shortest; of
    equal runs that in which most of a W must fit into a wait.
    """
    tried = [put_weights(few, costs, most_held, share) for share in _SHARES]
    best = min(range(len(tried)), key=lambda at: tried[at].ticks)
    return tried[best].orders if few is orders else put_weights(orders, costs, most_held, _SHARES[best]).orders


def put_weights(orders: Sequence[Order], costs: StageCosts, most_held: int, share: float) -> Tried:
    """``orders``: of each rank its forwards and backwards, which complete without deadlock; ``costs``: of each stage.

    ``most_held`` is at least the peak in flight of ``orders``. ``share``: of a W, that must fit into a wait.
    """
    ranks = _Ranks(orders, costs, most_held, share)
    ranks.run()
    assert ranks.at == list(map(len, orders)), "the forwards and backwards wait for each other"
    return Tried(max(ranks.free), tuple(map(tuple, ranks.done)))


class _Timeline:
    """Owns when each action ended, the W that wait on each rank, and when each rank next looks for work. ``stages`` of
    each rank; ``share``: of a W, that must fit into a wait.
    """

    def __init__(self, costs: tuple[Sequence[int], ...], pp: int, share: float, fold: Fold) -> None:
        self.pp, self.share, self.num_stages = pp, share, len(costs[0])
        self.fold: Fold = fold
        self.costs = dict(zip("FBW", costs, strict=True))
        self.stages = [stages_of(rank, pp, self.num_stages, fold) for rank in range(pp)]
        self.free = [0] * pp
        self.waiting: list[deque[Action]] = [deque() for _ in range(pp)]
        self.done: list[list[Action]] = [[] for _ in range(pp)]
        self.ends: dict[tuple[str, int, int], int] = {}
        self.looks: list[int | None] = [0] * pp  # None: when a neighbour has begun something
        self.agenda = [(0, rank) for rank in range(pp)]

    def next(self, rank: int, now: int) -> tuple[Action | None, int | None]:
        """An F or B that can start now, and when the soonest can; None while that is unknown."""
        raise NotImplementedError

    def begun(self, rank: int, action: Action) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while self.agenda:
            now, rank = heappop(self.agenda)
            if self.looks[rank] != now:
                continue  # the rank has looked earlier, for earlier work
            self.looks[rank] = None
            action, soonest = self.next(rank, now)
            if action is not None:
                self._start(rank, action, now)
            elif self._fits_a_weight(rank, now, soonest):
                self._start(rank, self.waiting[rank].popleft(), now)
            elif soonest is not None:
                self.look(rank, soonest)

    def _fits_a_weight(self, rank: int, now: int, soonest: int | None) -> bool:
        """Whether a W waits on the rank, and enough of it fits until other work can start."""
        if not self.waiting[rank] or soonest is None:
            return bool(self.waiting[rank])
        return soonest - now >= self.share * self.costs["W"][self.stages[rank][self.waiting[rank][0].chunk]]

    def _start(self, rank: int, action: Action, now: int) -> None:
        kind, microbatch, chunk = action
        stage = self.stages[rank][chunk]
        self.free[rank] = end = now + self.costs[kind][stage]
        self.done[rank].append(action)
        self.begun(rank, action)
        self.look(rank, end)
        if kind == "W":
            return
        self.ends[kind, microbatch, stage] = end
        if kind == "B":
            self.waiting[rank].append(action._replace(kind="W"))
        waits = stage + (1 if kind == "F" else -1)
        if 0 <= waits < self.num_stages:
            neighbour = rank_of(waits, self.pp, self.fold)
            self.wake(neighbour, max(end, self.free[neighbour]))

    def wake(self, rank: int, at: int) -> None:
        """A neighbour of ``rank`` has begun what ends at ``at``."""
        self.look(rank, at)

    def look(self, rank: int, at: int) -> None:
        """Look for work at ``at``, unless the rank looks sooner."""
        sooner = self.looks[rank]
        if sooner is None or at < sooner:
            self.looks[rank] = at
            heappush(self.agenda, (at, rank))


class _Ranks(_Timeline):
    """Owns how far each rank is in its order."""

    def __init__(self, orders: Sequence[Order], costs: StageCosts, most_held: int, share: float) -> None:
        super().__init__(costs.ticks, len(orders), share, LOOP)
        self.orders, self.most_held = orders, most_held
        self.at, self.held = [0] * self.pp, [0] * self.pp

    def next(self, rank: int, now: int) -> tuple[Action | None, int | None]:
        """None too if it would hold too much."""
        if self.at[rank] == len(self.orders[rank]):
            return None, None
        action = self.orders[rank][self.at[rank]]
        if action.kind == "F" and self.held[rank] >= self.most_held:
            return None, None
        before = needs(action.kind, action.microbatch, self.stages[rank][action.chunk], self.num_stages)
        ends = [self.ends.get(need) for need in before]
        if None in ends:
            return None, None
        ready = max((end for end in ends if end is not None), default=0)
        return action if ready <= now else None, ready

    def wake(self, rank: int, at: int) -> None:
        if self.looks[rank] is None:  # else it looks as it has decided: earlier looks would give plans other orders
            self.look(rank, at)

    def begun(self, rank: int, action: Action) -> None:
        self.at[rank] += action.kind != "W"
        self.held[rank] += {"F": 1, "B": 0, "W": -1}[action.kind]


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
_FOLDED_SHARES = (0.5, 0.0)  # of a W, that must fit into a wait


class _Way(NamedTuple):
    """One way to choose: the preferences of the ranks, and how much of a W must fit into a wait."""

    preferences: tuple[tuple[_Work, ...], tuple[_Work, ...]]
    share: float


def folded_orders(pp: int, num_microbatches: int, costs: StageCosts) -> tuple[Order, ...]:
    """Of each of ``pp`` ranks its F, B and W; ``costs``: of each of the 2·pp stages."""
    return _orders(pp, num_microbatches, costs.ticks)


@lru_cache(maxsize=256)
def _orders(pp: int, num_microbatches: int, costs: tuple[tuple[int, ...], ...]) -> tuple[Order, ...]:
    ways = [_Way(preferences, share) for preferences in _PREFERENCES for share in _FOLDED_SHARES]
    few = min(num_microbatches, 4 * pp)
    tried = [_FoldedRanks(pp, few, costs, way) for way in ways]
    best = min(range(len(ways)), key=lambda at: max(tried[at].free))
    found = tried[best] if few == num_microbatches else _FoldedRanks(pp, num_microbatches, costs, ways[best])
    return tuple(map(tuple, found.done))


class _FoldedRanks(_Timeline):
    """Owns how far each rank is with each kind of work."""

    def __init__(self, pp: int, num_microbatches: int, costs: tuple[Sequence[int], ...], way: _Way) -> None:
        super().__init__(costs, pp, way.share, V)
        self.num_microbatches, self.last = num_microbatches, 2 * pp - 1
        self.preferred = [way.preferences[rank >= max(1, pp // 2)] for rank in range(pp)]
        self.counts: list[dict[_Work, int]] = [dict.fromkeys(_WORK, 0) for _ in range(pp)]
        self.places = [2 * pp] * pp  # places for saved tensors of one microbatch on one chunk, not yet reserved
        self.run()
        all_ran = all(count == num_microbatches for counts in self.counts for count in counts.values())
        assert all_ran, "a microbatch that is let in has a place on every chunk"

    def next(self, rank: int, now: int) -> tuple[Action | None, int | None]:
        ready = {work: at for work in self.preferred[rank] if (at := self._ready(rank, work)) is not None}
        work = next((work for work, at in ready.items() if at <= now), None)
        action = None if work is None else Action(work[0], self.counts[rank][work], work[1])
        return action, min(ready.values(), default=None)

    def begun(self, rank: int, action: Action) -> None:
        kind, _, chunk = action
        if kind == "W":
            self.places[rank] += 1
            return
        self.counts[rank][kind, chunk] += 1
        self.places[rank] -= 2 * (kind == "F" and chunk == 0)

    def _ready(self, rank: int, work: _Work) -> int | None:
        """When the rank's next microbatch of ``work`` can start; None while that is unknown, or if it has no place."""
        (kind, chunk), microbatch = work, self.counts[rank][work]
        stage = self.stages[rank][chunk]
        if microbatch == self.num_microbatches:
            return None
        if kind == "F":
            if chunk == 0 and self.places[rank] < 2:
                return None
            return self.ends.get(("F", microbatch, stage - 1)) if stage else 0
        end = self.ends.get(("F", microbatch, stage))
        return end if end is None or stage == self.last else self.ends.get(("B", microbatch, stage + 1))
