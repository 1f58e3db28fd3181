"""Zero-bubble schedules: weight gradients (W) fill the waits of a rank.

zero_bubble (ZB-H1 of Qi et al. 2023, section 2.2):

    F and B   in the order of 1f1b
    W         runs while the next F or B cannot start, and before an F that would exceed the limit on memory
    memory    at most ``most_held`` pairs of microbatch and chunk of a rank are between their F and their W

Ranks are simulated in the order of time, and a free rank decides whether to run a W. The share of a W that must fit
into a wait is a parameter: each value is tried on a few microbatches, and the shortest run wins. With equal stages, a
rank idles for (pp − 1)·(F + B − W); in 1f1b for (pp − 1)·(F + B + W).

zero_bubble_v: two chunks per rank, folded into a v (ZB-V of Qi et al. 2024, "Pipeline Parallelism with Controllable
Memory", section 4). The paper repeats one pattern, for about equal F, B and W; here the costs of each stage decide.

    stages    of 4 ranks  0 1 2 3      a microbatch passes the first row, then the second row back: its loss is on
                          7 6 5 4      rank 0, and stages 3 and 4 exchange no message
    next      the first work in the rank's preferences that can start, else the oldest W; several preferences are tried
    memory    at most pp whole microbatches per rank, as in 1f1b: each reserves a place for both its chunks

With equal F, B and W, a rank idles for (pp − 1)·F, until the first microbatch reaches the last rank. That is optimal
up to 4·pp microbatches; with more, it is slightly longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from planner.fold import LOOP, Fold, V, rank_of, stages_of
from planner.pipeline.actions import Action, Order, needs

T = TypeVar("T")
_TICKS = 1 << 20  # of the longest action; rounding keeps the last digits of costs from deciding an order
_SHARES = (1.0, 0.5, 0.0)  # of a W that must fit into a wait; the largest first


class StageCosts(NamedTuple):
    """Time of each stage, in any unit: forward, backward without weight gradients, and weight gradients."""

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


def with_weights(orders: Sequence[Order], few: Sequence[Order], costs: StageCosts, most_held: int) -> tuple[Order, ...]:
    """Return ``orders`` with W inserted. The share is the one with the shortest run of ``few``, the orders of fewer
    microbatches (or ``orders`` itself); of equal runs, the largest share.
    """
    tried = {share: _Ranks(few, costs, most_held, share) for share in _SHARES}
    share = _shortest(tried)
    return (tried[share] if few is orders else _Ranks(orders, costs, most_held, share)).decided


def _shortest(tried: Mapping[T, _Timeline]) -> T:
    """Return the key of the shortest run; of equal runs the first."""
    return min(tried, key=lambda way: max(tried[way].free))


class _Timeline:
    """A simulation of all ranks that decides their orders: ``ends`` of actions, the pending W of each rank
    (``waiting``), and when each rank next looks for work (``looks``). ``share``: the part of a W that must fit into a
    wait.
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
        self.looks: list[int | None] = [0] * pp  # None: not before a neighbour starts an action
        self.agenda = [(0, rank) for rank in range(pp)]

    @property
    def decided(self) -> tuple[Order, ...]:
        return tuple(map(tuple, self.done))

    def next(self, rank: int, now: int) -> tuple[Action | None, int | None]:
        """Return an F or B that can start now, or None; and when the earliest one can, None while unknown."""
        raise NotImplementedError

    def begun(self, rank: int, action: Action) -> None:
        """Update the state of ``rank``, which starts ``action``."""
        raise NotImplementedError

    def run(self) -> None:
        while self.agenda:
            now, rank = heappop(self.agenda)
            if self.looks[rank] != now:
                continue  # the rank looked earlier
            self.looks[rank] = None
            action, soonest = self.next(rank, now)
            if action is not None:
                self._start(rank, action, now)
            elif self._fits_a_weight(rank, now, soonest):
                self._start(rank, self.waiting[rank].popleft(), now)
            elif soonest is not None:
                self.look(rank, soonest)

    def _fits_a_weight(self, rank: int, now: int, soonest: int | None) -> bool:
        """Whether the rank has a pending W, and enough of it fits before other work can start."""
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
        """Note that a neighbour of ``rank`` runs an action that ends at ``at``."""
        self.look(rank, at)

    def look(self, rank: int, at: int) -> None:
        """Make ``rank`` look for work at ``at``, unless it already looks sooner."""
        sooner = self.looks[rank]
        if sooner is None or at < sooner:
            self.looks[rank] = at
            heappush(self.agenda, (at, rank))


class _Ranks(_Timeline):
    """The simulation that inserts W into ``orders``, the forwards and backwards of each rank, which must not deadlock.

    ``most_held``: at least the peak in flight of ``orders``; ``at``, ``held``: position and pairs before W, by rank.
    """

    def __init__(self, orders: Sequence[Order], costs: StageCosts, most_held: int, share: float) -> None:
        super().__init__(costs.ticks, len(orders), share, LOOP)
        self.orders, self.most_held = orders, most_held
        self.at, self.held = [0] * self.pp, [0] * self.pp
        self.run()
        assert self.at == list(map(len, orders)), "the forwards and backwards wait for each other"

    def next(self, rank: int, now: int) -> tuple[Action | None, int | None]:
        """Return the next F or B as in the base class; no F while the rank is at its memory limit."""
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
        if self.looks[rank] is None:  # else keep its time: an earlier look would change the orders of plans
            self.look(rank, at)

    def begun(self, rank: int, action: Action) -> None:
        self.at[rank] += action.kind != "W"
        self.held[rank] += {"F": 1, "B": 0, "W": -1}[action.kind]


_Work = tuple[str, int]  # kind of action, chunk
_WORK: tuple[_Work, ...] = (("B", 0), ("B", 1), ("F", 0), ("F", 1))
_FORWARDS: tuple[_Work, ...] = (("F", 1), ("F", 0), ("B", 0), ("B", 1))
_PREFERENCES: tuple[tuple[tuple[_Work, ...], tuple[_Work, ...]], ...] = (  # for the first half of the ranks, the rest
    (_WORK, (("B", 1), ("F", 1), ("F", 0), ("B", 0))),
    (_WORK, _FORWARDS),
    (_WORK, (("B", 1), ("F", 1), ("B", 0), ("F", 0))),
    (_WORK, (("F", 1), ("B", 1), ("B", 0), ("F", 0))),
    ((("B", 1), ("F", 1), ("F", 0), ("B", 0)), _FORWARDS),
    (_FORWARDS, _FORWARDS),
)
_FOLDED_SHARES = (0.5, 0.0)  # of a W that must fit into a wait


class _Way(NamedTuple):
    """One policy to try: the preferences of the ranks, and the share of a W that must fit into a wait."""

    preferences: tuple[tuple[_Work, ...], tuple[_Work, ...]]
    share: float


def folded_orders(pp: int, num_microbatches: int, costs: StageCosts) -> tuple[Order, ...]:
    """Return the zero_bubble_v orders of ``pp`` ranks; ``costs`` of each of the 2·pp stages."""
    return _orders(pp, num_microbatches, costs.ticks)


@lru_cache(maxsize=256)
def _orders(pp: int, num_microbatches: int, costs: tuple[tuple[int, ...], ...]) -> tuple[Order, ...]:
    ways = [_Way(preferences, share) for preferences in _PREFERENCES for share in _FOLDED_SHARES]
    few = min(num_microbatches, 4 * pp)
    tried = {way: _FoldedRanks(pp, few, costs, way) for way in ways}
    way = _shortest(tried)
    return (tried[way] if few == num_microbatches else _FoldedRanks(pp, num_microbatches, costs, way)).decided


class _FoldedRanks(_Timeline):
    """The simulation of zero_bubble_v: ``counts`` of started microbatches for each rank and kind of work."""

    def __init__(self, pp: int, num_microbatches: int, costs: tuple[Sequence[int], ...], way: _Way) -> None:
        super().__init__(costs, pp, way.share, V)
        self.num_microbatches, self.last = num_microbatches, 2 * pp - 1
        self.preferred = [way.preferences[rank >= max(1, pp // 2)] for rank in range(pp)]
        self.counts: list[dict[_Work, int]] = [dict.fromkeys(_WORK, 0) for _ in range(pp)]
        self.places = [2 * pp] * pp  # free places; each holds the saved tensors of one microbatch on one chunk
        self.run()
        all_ran = all(count == num_microbatches for counts in self.counts for count in counts.values())
        assert all_ran, "an admitted microbatch has a place on every chunk"

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
        """Return when the rank's next microbatch of ``work`` can start; None while unknown, or without a free place."""
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
