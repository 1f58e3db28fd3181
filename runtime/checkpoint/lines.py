"""Lines of saves: each save of a line continues the one before it, and a directory may hold several lines.

    line a     step 2 → step 4 → step 6
                  ↘
    line b           step 4 → step 6           begun by `train --resume run/step-00000002`: before = ((a, 2),)

A run that starts afresh, or resumes from a save that its user named, begins a line. Restarts, `--resume auto` and
`--keep` follow one line; saves of others stay as they are.
"""

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field

from runtime.distributed.faults.watch import host_key, start_of

Step = Annotated[int, Field(ge=0, le=2**48)]
LineId = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
NO_LINE = ""  # the id of all saves that were written before lines had one
_RUN = "TORCHELASTIC_RUN_ID"


class Line(BaseModel):
    """``parent``: the checksum of the manifest from which the save continues, None for the first of a training.

    ``before``: the lines that this one grew from, each with its last step that counts.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: LineId
    parent: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    before: Annotated[tuple[tuple[LineId, Step], ...], FailFast(), Field(max_length=10_000)] = ()

    @classmethod
    def new(cls) -> Self:
        return cls(id=uuid.uuid4().hex)

    def after(self, parent: str) -> Self:
        """This line, when a save of it has been written or loaded. ``parent``: the checksum of its manifest."""
        return self.model_copy(update={"parent": parent})

    def branch(self, line: str, step: int) -> Self:
        """A line that continues from the save of ``step`` on this one."""
        return self.model_copy(update={"id": line, "before": (*self.before, (self.id, step))})


@dataclass(frozen=True, slots=True)
class SavePosition:
    """The position of a save: its line, and its step on it."""

    line: Line
    step: int

    def is_on(self, line: Line) -> bool:
        """Whether the save belongs to ``line``, or to a line that this one grew from."""
        return self.line.id == line.id or any(self.line.id == i and self.step <= last for i, last in line.before)


def line_of_run(environment: Mapping[str, str]) -> str:
    """The id of the line that this run begins: the same in each of its restarts, and in no other run.

    A restart has the run id of its launcher and the same parent process. A launcher of several hosts may start rank 0
    elsewhere: then it begins a new line, which loses steps and never mixes two trainings.
    """
    run = environment.get(_RUN)
    if run is None:
        return uuid.uuid4().hex
    parent = os.getppid()
    return xxhash.xxh3_128_hexdigest(f"{run} {host_key()} {parent} {start_of(parent)}".encode())
