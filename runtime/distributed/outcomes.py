"""Outcome of a rank, sent to its launcher over anonymous memory: nothing can be left behind in a directory, and a rank
that is stopped while writing blocks no process.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from passes.errors import PlanError, message_of
from runtime.distributed.faults.failure import Failure, StepError, is_of_a_peer
from runtime.distributed.unnamed_memory import unnamed_memory


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: its result, or its failure and when that was (seconds, one clock for all ranks).

    ``error``: the PlanError itself. ``of_a_peer``: the failure says no more than that another rank is gone.
    ``last_line``: of all that the rank would say.
    """

    rank: int
    result: Any = None
    failure: Failure | None = None
    error: PlanError | None = None
    of_a_peer: bool = False
    last_line: str = ""
    seconds: float = 0.0

    @classmethod
    def failed_by(cls, rank: int, error: BaseException) -> Outcome:
        """The outcome of a failed function; an engine has published its errors itself."""
        text = message_of(error)
        where = text.partition(": ")[0] if isinstance(error, StepError) else f"rank {rank}"
        return cls(
            rank,
            failure=Failure.of(rank, where, error),
            error=error if isinstance(error, PlanError) else None,
            of_a_peer=is_of_a_peer(error),
            last_line=text.splitlines()[-1] if text else type(error).__name__,
            seconds=time.monotonic(),
        )

    @property
    def failed(self) -> bool:
        return self.failure is not None


class Outbox:
    """An anonymous file, shared by the launcher and one rank; it disappears after both close it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = unnamed_memory("meshwright-outcome") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Callable[..., Outbox], tuple[Any, ...]]:
        """Passes the outbox to another process at its start."""
        return _received, (reduction.DupFd(self._descriptor),)  # pyright: ignore[reportAttributeAccessIssue]

    def write(self, content: bytes) -> None:
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(content)

    def read(self) -> Outcome | None:
        """The rank's outcome, once it has ended; None if it wrote nothing, or not all."""
        with open(self._descriptor, "rb", closefd=False) as file, suppress(EOFError, pickle.UnpicklingError):
            file.seek(0)
            return pickle.load(file)
        return None

    def close(self) -> None:
        os.close(self._descriptor)


def _received(duplicate: Any) -> Outbox:
    return Outbox(duplicate.detach())
