"""Start local ranks: N processes that run one function with the environment that torchrun would give them.

    launch(function, 4, *args) -> [result of rank 0, …, result of rank 3]

The parent hosts the rendezvous store, so no port can be taken between choosing it and using it, and the store lives as
long as any rank. It listens on the loopback alone, and so do the ranks (``loopback``). Ranks are forked from a server
process that has imported torch once, so starting them costs little.
When one rank fails, or time is up, all end, and may be started again; when the parent ends, however it ends, so do the
ranks.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from passes.errors import RunError
from runtime.distributed.faults.failure import Failure
from runtime.distributed.forwarding import Forwarding
from runtime.distributed.local_ranks import LocalRanks
from runtime.distributed.outcomes import Outcome

STOP_SECONDS = 60.0  # for ranks to finish a step and save, after SIGTERM or Ctrl-C


class RankError(RunError):
    """A rank failed for another reason than bad input; the message is the first failure, in one line, and its place.
    ``last_lines``: of each failed rank's output, by rank.
    """

    def __init__(self, told: str, last_lines: Mapping[int, str] | None = None) -> None:
        super().__init__(told)
        self.last_lines = dict(last_lines or {})


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float = 600.0,
    max_restarts: int = 0,
    on_restart: Callable[[int, str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    stop_seconds: float = STOP_SECONDS,
) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local ranks and return their results in rank order.

    ``function`` and ``args`` are pickled: a function at the top of an importable module. Results are pickled too.

    After a failure that is not bad input all ranks are started again, up to ``max_restarts`` times, with
    TORCHELASTIC_RESTART_COUNT and the same TORCHELASTIC_RUN_ID in their environment, and a new ``timeout_seconds``;
    before a restart the failure goes to stderr and ``on_restart(number of the restart, the failure)`` is called.

    SIGTERM and Ctrl-C are forwarded to the ranks as SIGTERM. If all of them return within ``stop_seconds``, so does
    this, after ``on_stop(signal)``; else the ranks are ended and this process too. A second signal ends all at once.

    Raises: the PlanError of the first rank that raised one; RankError for any other failure or when time is up.
    """
    run_id = uuid.uuid4().hex
    for attempt in range(max_restarts + 1):
        ranks = LocalRanks(num_ranks, attempt, timeout_seconds, run_id)
        with Forwarding(ranks.pids, stop_seconds) as signals, ranks.ended(signals):
            ranks.start(function, args)
            ranks.wait(signals)
        if signals.received is not None and any(outcome.failed for outcome in ranks.outcomes):
            signals.end()
        if signals.received is not None and on_stop is not None:
            on_stop(signals.received)
        try:
            return _results(ranks.outcomes, ranks.failures, ranks.timed_out, timeout_seconds)
        except RankError as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nrestart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)
            if on_restart is not None:
                on_restart(attempt + 1, str(error))
    raise AssertionError("an attempt ends with results or an error")


def _results(outcomes: list[Outcome], told: list[Failure], timed_out: bool, timeout_seconds: float) -> list[Any]:
    """``told``: failures published by ranks and their parent, in the order of the store."""
    failed = sorted((o for o in outcomes if o.failed), key=lambda outcome: (outcome.of_a_peer, outcome.seconds))
    if not failed:
        return [outcome.result for outcome in outcomes]
    ranks = {outcome.rank for outcome in failed}
    first = next((failure for failure in told if failure.rank in ranks), failed[0].failure)
    assert first is not None
    last_lines = {outcome.rank: outcome.last_line for outcome in outcomes if outcome.failed}
    if timed_out and failed[0].seconds == inf and not told:
        late = sorted(ranks)
        raise RankError(f"ranks {late} did not finish in {timeout_seconds:g} s and were terminated", last_lines)
    error = outcomes[first.rank].error
    if error is not None:
        raise error
    if first.is_input:
        raise first.plan_error
    raise RankError(first.text, last_lines)
