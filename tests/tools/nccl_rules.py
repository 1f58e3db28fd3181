"""The ranks of a pipeline as threads of one process, under NCCL's rules instead of a network.

    first use      a communicator is built when it is used first, and the host waits there for all members
    rendezvous     a send is through only when its receive is posted; ``wait`` of one that is not holds the host
    order          no tags: the k-th send on a communicator meets the k-th receive. A tag, shape or dtype that differs
                   is an error here (over there it would be wrong numbers)

One rank runs at a time, until it must wait; then the next rank goes on whose wait is over. When none can, all are
stuck: that is known at once, without any clock. What a rank waits for stays true once it is true, so the order in which
ranks take their turns does not change whether they get stuck.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from runtime.distributed import opening
from runtime.pipeline import p2p


class Stopped(BaseException):
    """Ends a rank's thread when all are stuck or one has failed: no ``except Exception`` may catch it."""


@dataclass
class Outcome:
    """``stuck``: what each rank that is held waits for. ``results``: what ``work`` returned, None where it did not end.

    ``held_by_sends``: sends started with ``isend`` whose ``wait`` held a rank, and not at a step's end.
    """

    results: list[Any]
    stuck: dict[int, str]
    error: Exception | None
    held_by_sends: list[str]


class Turns:
    """Threads that take turns. Owns: whose turn it is, and what each other rank waits for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.results: list[Any] = [None] * size
        self.error: Exception | None = None
        self.stuck: dict[int, str] = {}
        self._mine = threading.local()
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {r: (lambda: True, "the start") for r in range(size)}
        self._over = False

    @property
    def rank(self) -> int:
        return self._mine.rank

    def run(self, work: Callable[[int], Any]) -> None:
        threads = [threading.Thread(target=self._run, args=(rank, work), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._next(after=-1)
        for thread in threads:
            thread.join()

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        if ready():
            return
        self._waits[self.rank] = (ready, what)
        self._next(after=self.rank)
        self._take_turn()

    def _run(self, rank: int, work: Callable[[int], Any]) -> None:
        self._mine.rank = rank
        try:
            self._take_turn()
            self.results[rank] = work(rank)
        except Stopped:
            pass
        except Exception as error:
            self.error, self._over = error, True
        self._next(after=rank)

    def _take_turn(self) -> None:
        self._turn[self.rank].acquire()
        if self._over:
            raise Stopped

    def _next(self, after: int) -> None:
        """Give the turn to the next rank that can go on; when none can, end all."""
        ranks = [(after + step) % self.size for step in range(1, self.size + 1)]
        waiting = [rank for rank in ranks if rank in self._waits]
        for rank in waiting:
            if self._over or self._waits[rank][0]():
                del self._waits[rank]
                self._turn[rank].release()
                return
        if waiting:
            self.stuck = {rank: self._waits[rank][1] for rank in sorted(waiting)}
            self._over = True
            self._next(after)


@dataclass
class Communicator:
    """A process group. Owns: who has used it, how many collectives each member has called, and what was posted."""

    members: tuple[int, ...]
    options: Any = None
    used: set[int] = field(default_factory=set)
    calls: Counter[int] = field(default_factory=Counter)
    posted: dict[tuple[int, str], list[tuple[Tensor, tuple[Any, ...]]]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"the communicator of ranks {list(self.members)}"


class Work:
    """A message under way: the ``index``-th of ``sender`` on a communicator, as one of its ends sees it."""

    def __init__(self, rules: NcclRules, group: Communicator, sender: int, side: str, index: int) -> None:
        self.rules, self.group, self.sender, self.side, self.index = rules, group, sender, side, index

    def __str__(self) -> str:
        return f"{self.side} {self.index} from rank {self.sender} on {self.group}"

    def is_through(self) -> bool:
        return all(len(self.group.posted.get((self.sender, side), ())) > self.index for side in ("send", "recv"))

    def is_completed(self) -> bool:
        return self.rules.tells_ends and self.is_through()

    def wait(self) -> None:
        self.rules.wait(self)


class NcclRules:
    """Stands where our modules see ``torch.distributed``, for ``size`` ranks."""

    def __init__(self, size: int, *, lazy: bool, tells_ends: bool) -> None:
        """``lazy``: communicators are built at their first use. ``tells_ends``: works say when they are through."""
        self.lazy, self.tells_ends = lazy, tells_ends
        self.turns = Turns(size)
        self.made: list[Communicator] = []
        self._num_made: Counter[int] = Counter()
        self.held_by_sends: list[str] = []
        self._at_end: set[int] = set()

    def at_end(self, drain: Callable[[], None]) -> Callable[[], None]:
        """``drain``, or ``settle`` of a forward without gradients, in which sends may be waited for."""

        def run() -> None:
            self._at_end.add(self.turns.rank)
            drain()
            self._at_end.discard(self.turns.rank)

        return run

    def wait(self, work: Work) -> None:
        if work.side == "send" and self.turns.rank not in self._at_end and not work.is_through():
            self.held_by_sends.append(str(work))
        self.turns.wait_until(work.is_through, str(work))

    # ---- what stands for torch.distributed

    class ProcessGroupNCCL:
        @staticmethod
        def Options(**given: bool) -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None), **given)

    def get_backend_config(self, group: Communicator) -> str:
        return "cpu:nccl"

    def new_group(self, ranks: Sequence[int], *, pg_options: Any = None, **_: Any) -> Communicator | None:
        """The n-th group that a rank makes is the n-th of every rank."""
        rank = self.turns.rank
        if self._num_made[rank] == len(self.made):
            self.made.append(Communicator(tuple(ranks), pg_options))
        group = self.made[self._num_made[rank]]
        self._num_made[rank] += 1
        assert group.members == tuple(ranks), f"rank {rank} makes {ranks} where another made {group}"
        return group if rank in ranks else None

    def all_reduce(self, tensor: Tensor, *, group: Communicator) -> None:
        self._build(group)
        group.calls[self.turns.rank] += 1
        count = group.calls[self.turns.rank]
        self.turns.wait_until(lambda: all(group.calls[r] >= count for r in group.members), f"all_reduce on {group}")

    def isend(self, tensor: Tensor, target: int, *, group: Communicator, tag: int = 0) -> Work:
        return self._post(tensor, group, self.turns.rank, "send", tag)

    def irecv(self, tensor: Tensor, source: int, *, group: Communicator, tag: int = 0) -> Work:
        return self._post(tensor, group, source, "recv", tag)

    def send(self, tensor: Tensor, target: int, *, group: Communicator) -> None:
        work = self.isend(tensor, target, group=group)
        self.turns.wait_until(work.is_through, str(work))

    def recv(self, tensor: Tensor, source: int, *, group: Communicator) -> None:
        self.irecv(tensor, source, group=group).wait()

    # ---- the rules

    def _build(self, group: Communicator) -> None:
        group.used.add(self.turns.rank)
        if self.lazy:
            self.turns.wait_until(lambda: group.used == set(group.members), f"the first use of {group}")

    def _post(self, tensor: Tensor, group: Communicator, sender: int, side: str, tag: int) -> Work:
        self._build(group)
        mine = group.posted.setdefault((sender, side), [])
        theirs = group.posted.setdefault((sender, "recv" if side == "send" else "send"), [])
        index = len(mine)
        mine.append((tensor, (tag, tuple(tensor.shape), tensor.dtype)))
        if len(theirs) > index:
            assert mine[index][1] == theirs[index][1], (
                f"order: {side} {index} from rank {sender} on {group} is {mine[index][1]}, not {theirs[index][1]}"
            )
            out, into = (theirs, mine) if side == "recv" else (mine, theirs)
            into[index][0].copy_(out[index][0])
        return Work(self, group, sender, side, index)


def run_ranks(
    size: int, work: Callable[[int, NcclRules], Any], *, lazy: bool = True, tells_ends: bool = True
) -> Outcome:
    """``work(rank, rules)`` on ``size`` ranks; to links, first use and p2p ``rules`` is ``torch.distributed``."""
    rules = NcclRules(size, lazy=lazy, tells_ends=tells_ends)
    with pytest.MonkeyPatch.context() as patch:
        for module in (opening, p2p):
            patch.setattr(module, "dist", rules)
        rules.turns.run(lambda rank: work(rank, rules))
    turns = rules.turns
    return Outcome(turns.results, turns.stuck, turns.error, rules.held_by_sends)
