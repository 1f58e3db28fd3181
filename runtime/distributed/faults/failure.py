"""The failure of one rank: its activity and its error, in one line that all ranks can print.

    rank 2 (tp 0 · pp 1 · dp 0), stage 1, step 5, microbatch 3, forward (F3.0): KeyError: 'labels'

An error that only reports a lost peer is not a cause: another rank has the cause.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from passes.errors import PlanError, RunError, message_of

TRACEBACK = "MESHWRIGHT_TRACEBACK"
_WORDS_OF_TIME = ("timed out", "timeout")
_WORDS_OF_PEERS = (
    *("closed by peer", "reset by peer", "connection refused", "broken pipe", "socket closed", "connection reset"),
    *("connection closed", "connection was likely closed", "pair closure", "connectfullmesh", "remote process"),
    *("nccl communicator was aborted", *_WORDS_OF_TIME),
)
_HOUSES = Path(__file__).resolve().parents[3]
_NOT_THE_USERS = (
    *(str(_HOUSES / name) for name in ("planner", "passes", "runtime")),
    str(Path(torch.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)


class StepError(RunError):
    """The failure of a step: the first line names rank, stage, step, microbatch and action, the last the cause."""


class PeerError(StepError):
    """The failure of a step because of another rank; the last line is that rank's failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank. ``where``: the rank and its activity. ``cause``: one line. ``is_input``: a PlanError, with
    its ``at`` and ``fix``. ``frames``: the user's source lines on the stack, the deepest last; all lines without any.
    """

    rank: int
    where: str
    cause: str
    at: str = ""
    fix: str = ""
    is_input: bool = False
    frames: str = ""

    @classmethod
    def of(cls, rank: int, where: str, error: BaseException) -> Failure:
        """Return the failure of a rank at ``where`` by ``error``, or by its cause if it is a StepError."""
        cause = cause_of(error)
        if isinstance(cause, PlanError):
            return cls(rank, where, first_line(cause.what), str(cause.where or ""), cause.fix, True, frames_of(cause))
        line = f"{type(cause).__name__}: {first_line(message_of(cause))}".removesuffix(": ")
        return cls(rank, where, line, place_of(cause), frames=frames_of(cause))

    def __str__(self) -> str:
        """Return the failure in one line."""
        return f"{self.where}: {self.cause}"

    @property
    def text(self) -> str:
        """The failure for the user: the line, the place in the user's code, the fix, and the traceback on request."""
        lines = [str(self)]
        if self.at:
            lines.append(f"  at:  {self.at}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        if self.frames and os.environ.get(TRACEBACK):
            lines.append(self.frames.rstrip())
        elif self.frames:
            lines.append(f"  {TRACEBACK}=1 shows the traceback")
        return "\n".join(lines)

    @property
    def plan_error(self) -> PlanError:
        """The same error for another rank to raise."""
        return PlanError(str(self), where=self.at, fix=self.fix)


def cause_of(error: BaseException) -> BaseException:
    """Return the cause of a StepError; any other error itself."""
    while isinstance(error, StepError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_of_a_peer(error: BaseException) -> bool:
    """Return whether ``error`` only reports that a connection to another rank ended or timed out."""
    if isinstance(error, PeerError):
        return True
    error = cause_of(error)
    if isinstance(error, PlanError) or not isinstance(error, RuntimeError | ConnectionError):
        return False
    text = message_of(error).lower()
    return any(words in text for words in _WORDS_OF_PEERS)


def is_of_time(error: BaseException) -> bool:
    text = message_of(cause_of(error)).lower()
    return any(words in text for words in _WORDS_OF_TIME)


def place_of(error: BaseException) -> str:
    """Return the deepest line of the user's code in the traceback of ``error``; "" without one."""
    frames = list(_frames(error, users_alone=True))
    if not frames:
        return ""
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}" + (f", `{last.line}`" if last.line else "")


def frames_of(error: BaseException) -> str:
    """Return the user's lines in the traceback; all lines if there are none, or on request."""
    users = list(_frames(error, users_alone=os.environ.get(TRACEBACK) != "all"))
    return "".join(traceback.format_list(users or list(_frames(error, users_alone=False))))


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _frames(error: BaseException, *, users_alone: bool) -> Iterator[traceback.FrameSummary]:
    for frame in traceback.extract_tb(error.__traceback__):
        if not users_alone or not frame.filename.startswith(_NOT_THE_USERS):
            yield frame
