"""The placement of weight gradients: each W fills a wait of its rank (ZB-H1 of Qi et al. 2023, section 2.2).

    F and B   in the order in which they are given
    W         if the next F or B cannot start yet, and before an F that would hold more than is allowed
    held      of a rank, at most ``most_held`` pairs of microbatch and chunk between their F and their W

The ranks are run in the order of time, each W decided when its rank is free. How much of a W must fit into a wait is
open: all of it, half of it or nothing is tried on a few microbatches, and the shortest run is taken.

    equal stages of F, B, W     idle time of a rank (pp − 1)·(F + B − W), of 1f1b (pp − 1)·(F + B + W)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from planner.fold import LOOP, Fold, rank_of, stage_of
from planner.pipeline.actions import Action, Order, needs

_TICKS = 1 << 20  # of the longest action: so that the last digits of costs decide nothing
_SHARES = (1.0, 0.5, 0.0)  # of a W, that must fit into a wait


class StageCosts(NamedTuple):
    """Of each stage, in any unit of time: forward, backward without the gradients of weights, and those."""

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]

    @classmethod
    def equal(cls, num_stages: int) -> StageCosts:
        return cls(*([1.0] * num_stages for _ in range(3)))

    @property
    def ticks(self) -> tuple[list[int], list[int], list[int]]:
        """In integers."""
        longest = max(map(max, self)) or 1.0
        forward, backward, weights = ([round(cost * _TICKS / longest) for cost in costs] for costs in self)
        return forward, backward, weights


class Tried(NamedTuple):
    """Orders with their W, and the ticks that they take."""

    ticks: int
    orders: tuple[Order, ...]


def best_share(orders: Sequence[Order], costs: StageCosts, most_held: int, fold: Fold = LOOP) -> float:
    """How much of a W must fit into a wait, for the shortest run of ``orders``; of equal runs the largest."""
    tried = [(put_weights(orders, costs, most_held, share, fold).ticks, -share) for share in _SHARES]
    return -min(tried)[1]


def put_weights(orders: Sequence[Order], costs: StageCosts, most_held: int, share: float, fold: Fold = LOOP) -> Tried:
    """``orders``: of each rank its forwards and backwards, which complete without deadlock; ``costs``: of each stage.

    ``most_held`` is at least the peak in flight of ``orders``. ``share``: of a W, that must fit into a wait.
    """
    ranks = _Ranks(orders, costs, most_held, share, fold)
    ranks.run()
    return Tried(max(ranks.free), tuple(map(tuple, ranks.done)))


class _Ranks:
    """Owns how far each rank is, when each action ended, and the ranks that sleep until a neighbour acts."""

    def __init__(self, orders: Sequence[Order], costs: StageCosts, most_held: int, share: float, fold: Fold) -> None:
        self.orders, self.pp = orders, len(orders)
        self.fold: Fold = fold
        self.costs = dict(zip("FBW", costs.ticks, strict=True))
        self.num_stages = len(costs.forward)
        self.most_held, self.share = most_held, share
        self.at, self.held, self.free = ([0] * self.pp for _ in range(3))
        self.waiting: list[deque[Action]] = [deque() for _ in orders]
        self.done: list[list[Action]] = [[] for _ in orders]
        self.ends: dict[tuple[str, int, int], int] = {}
        self.asleep = set[int]()
        self.agenda = [(0, rank) for rank in range(self.pp)]

    def run(self) -> None:
        while self.agenda:
            now, rank = heappop(self.agenda)
            action, ready = self._next(rank)
            if ready is not None and ready <= now:
                assert action is not None, "something is ready"
                self.at[rank] += 1
                self._start(rank, action, now)
            elif self.waiting[rank] and (ready is None or ready - now >= self.share * self._weights(rank)):
                self._start(rank, self.waiting[rank].popleft(), now)
            elif ready is not None:
                heappush(self.agenda, (ready, rank))
            elif action is not None:
                self.asleep.add(rank)
        assert not self.asleep, "the forwards and backwards wait for each other"

    def _next(self, rank: int) -> tuple[Action | None, int | None]:
        """The next F or B, and when it can start; None while that is unknown, or if it would hold too much."""
        if self.at[rank] == len(self.orders[rank]):
            return None, None
        action = self.orders[rank][self.at[rank]]
        if action.kind == "F" and self.held[rank] >= self.most_held:
            return action, None
        before = needs(action.kind, action.microbatch, self._stage(rank, action), self.num_stages)
        ends = [self.ends.get(need) for need in before]
        return action, None if None in ends else max((end for end in ends if end is not None), default=0)

    def _start(self, rank: int, action: Action, now: int) -> None:
        stage = self._stage(rank, action)
        end = now + self.costs[action.kind][stage]
        self.done[rank].append(action)
        self.free[rank] = end
        heappush(self.agenda, (end, rank))
        if action.kind == "W":
            self.held[rank] -= 1
            return
        self.ends[action.kind, action.microbatch, stage] = end
        if action.kind == "F":
            self.held[rank] += 1
        else:
            self.waiting[rank].append(action._replace(kind="W"))
        waits = stage + (1 if action.kind == "F" else -1)
        if 0 <= waits < self.num_stages:
            self._wake(rank_of(waits, self.pp, self.fold), end)

    def _wake(self, rank: int, now: int) -> None:
        if rank in self.asleep:
            self.asleep.discard(rank)
            heappush(self.agenda, (max(now, self.free[rank]), rank))

    def _weights(self, rank: int) -> int:
        return self.costs["W"][self._stage(rank, self.waiting[rank][0])]

    def _stage(self, rank: int, action: Action) -> int:
        return stage_of(rank, action.chunk, self.pp, self.fold)
