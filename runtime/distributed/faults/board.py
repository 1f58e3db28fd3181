"""What ranks tell each other in the key-value store, apart from every collective.

failures     a list in the order of the store; the first that was not withdrawn is the cause of all
pulses       of each rank: a count that grows, its process, what it is at
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from runtime.distributed.faults.failure import Failure

_WITHDRAWN = b"withdrawn"
_SESSION = "meshwright/session"


@dataclass(frozen=True, slots=True)
class Pulse:
    """``at``: what the rank is at, for ``seconds`` now; ``line``: of its code, known once it stays there; ``waits``:
    for other ranks. ``has_left``: it ended its part by itself, or is about to, and beats no more. ``page``: the
    descriptor, in its process, of what it writes down before each action."""

    rank: int
    beat: int
    host: str
    pid: int
    start: str
    at: str
    seconds: float = 0.0
    line: str = ""
    waits: bool = False
    has_left: bool = False
    page: int = -1


class Board:
    """The part of a store that one attempt's ranks share.

    ``session``: the number of the process groups that it is about; a failure in earlier ones, which its rank outlived,
    is none of theirs. None: of all, for the process that launched the ranks.
    """

    def __init__(self, store: Store, session: int | None = None) -> None:
        self.store, self.session = store, session
        self._failures = PrefixStore("meshwright/failures", store)
        self._pulses: Any = PrefixStore(f"meshwright/pulses/{session}", store)

    # ---- failures

    def publish(self, failure: Failure) -> int:
        """Its number, to withdraw it by."""
        number = self._failures.add("count", 1)
        self._failures.set(str(number), json.dumps([self.session, asdict(failure)]))
        return number

    def withdraw(self, number: int) -> None:
        """Whoever failed goes on after all."""
        self._failures.set(str(number), _WITHDRAWN.decode())

    def first(self) -> Failure | None:
        return next(self.failures(), None)

    def failures(self) -> Iterator[Failure]:
        """Those that stand, the first of all first."""
        for number in range(1, self._failures.add("count", 0) + 1):
            if not self._failures.check([str(number)]):
                continue  # its rank is writing
            content = self._failures.get(str(number))
            if content == _WITHDRAWN:
                continue
            session, fields = json.loads(content)
            if session is None or self.session is None or session == self.session:
                yield Failure(**fields)

    # ---- pulses

    def latest(self) -> Board:
        """That of the newest session, for the process that launched the ranks."""
        if not self.store.check([_SESSION]):
            return self
        return Board(self.store, int(self.store.get(_SESSION)))

    def join(self, pulse: Pulse) -> None:
        """The first beat of a rank."""
        self.beat(pulse)
        self.store.set(_SESSION, str(self.session))
        self._pulses.append("joined", f"{json.dumps([pulse.rank, pulse.host])}\n")

    def beat(self, pulse: Pulse) -> None:
        self._pulses.set(str(pulse.rank), json.dumps(asdict(pulse)))

    def hosts(self) -> dict[int, str]:
        """The host of each rank that has joined."""
        if not self._pulses.check(["joined"]):
            return {}
        return dict(json.loads(line) for line in self._pulses.get("joined").decode().splitlines())

    def pulses(self, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Of ranks that have joined."""
        ranks = list(ranks)
        contents = self._pulses.multi_get([str(rank) for rank in ranks]) if ranks else []
        return {rank: Pulse(**json.loads(content)) for rank, content in zip(ranks, contents, strict=True)}
