"""Lines of saves: each save of a line continues the one before it, and a directory may hold several lines.

    line a     step 2 → step 4 → step 6
                  ↘
    line b           step 4 → step 6           begun by `train --resume run/step-00000002`: before = ((a, 2),)

A run from scratch, or from a save that the user named, begins a line. Restarts, `--resume auto` and `--keep` follow one
line, and do not touch saves of others.
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
NO_LINE = ""  # the id of all saves from versions without lines
_RUN = "TORCHELASTIC_RUN_ID"


class Line(BaseModel):
    """The line of a save. ``parent``: the checksum of the manifest that the save continues, None for the first save.

    ``before``: the lines that this one continues, each with the last step that belongs to it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: LineId
    parent: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    before: Annotated[tuple[tuple[LineId, Step], ...], FailFast(), Field(max_length=10_000)] = ()

    @classmethod
    def new(cls) -> Self:
        return cls(id=uuid.uuid4().hex)

    def after(self, parent: str) -> Self:
        """Return this line after a save of it was written or loaded. ``parent``: the checksum of its manifest."""
        return self.model_copy(update={"parent": parent})

    def branch(self, line: str, step: int) -> Self:
        """Return a line with the id ``line`` that continues the save of ``step`` on this one."""
        return self.model_copy(update={"id": line, "before": (*self.before, (self.id, step))})


@dataclass(frozen=True, slots=True)
class SavePosition:
    """The position of a save: its line and its step."""

    line: Line
    step: int

    def is_on(self, line: Line) -> bool:
        """Return whether the save belongs to ``line``, or to a line that it continues."""
        return self.line.id == line.id or any(self.line.id == i and self.step <= last for i, last in line.before)


def line_of_run(environment: Mapping[str, str]) -> str:
    """Return the id of the line that this run begins: the same in each of its restarts, and in no other run.

    A restart has the launcher's run id and the same parent process. If a launcher of several hosts starts rank 0
    elsewhere, a new line begins: this loses steps, but never mixes two trainings.
    """
    run = environment.get(_RUN)
    if run is None:
        return uuid.uuid4().hex
    parent = os.getppid()
    return xxhash.xxh3_128_hexdigest(f"{run} {host_key()} {parent} {start_of(parent)}".encode())
