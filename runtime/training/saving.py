"""The saves of a run: when they are made, which of them stay, and which one a run goes on from."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from planner.errors import PlanError
from runtime.checkpoint.saves import by_newest, owned, prune
from runtime.distributed.agreement import agreed
from runtime.engine import Engine
from runtime.training.job import AUTO, Job, check_saves
from runtime.weights.gather import from_rank_0


class RunSaves:
    """Saves of one run. Owns, on rank 0, the right to write to their directory.

    ``extra``: what goes with each save, to be compared when a run goes on from it. A save that fails on the way is
    told and the training goes on; the last one must be good.
    """

    def __init__(self, engine: Engine, job: Job, extra: dict[str, Any]) -> None:
        self.engine, self.job, self.extra = engine, job, extra
        self._stack = ExitStack()
        self._saved: int | None = None

    def __enter__(self) -> Self:
        with agreed(self.engine.groups):
            if self.engine.groups.rank == 0:
                check_saves(self.job)
                if self.job.save is not None:
                    self._stack.enter_context(owned(self.job.save))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def after_step(self) -> bool:
        """Save if this step is one to be saved, without a wait for the disk; whether it was."""
        every = self.job.save_every
        is_due = self.job.save is not None and every is not None and self.engine.step_index % every == 0
        if is_due:
            self._begin()
        return is_due

    def finish(self) -> None:
        """Save what is not saved yet, and return when all of it is on the disk."""
        if self.job.save is None:
            return
        self._await()
        if self._saved != self.engine.step_index:
            self.engine.save(self.job.save, extra=self.extra)
        self._prune()
        self._say(f"saved step {self.engine.step_index} in {self.job.save}")

    def resumed(self) -> Path | None:
        """Take up the training where a save left it; the save, None where there is none yet.

        ``auto`` passes over saves that are damaged and says which. Raises PlanError on every rank where the named
        save, or every one that there is, cannot be taken.
        """
        if self.job.resume is None:
            return None
        if self.job.resume != AUTO:
            return self._take(Path(self.job.resume))
        assert self.job.save is not None
        with agreed(self.engine.groups):
            found = by_newest(self.job.save) if self.engine.groups.rank == 0 else None
        return self._newest(*from_rank_0(self.engine.groups, found))

    def _newest(self, saves: list[Path], errors: list[PlanError]) -> Path | None:
        for save in saves:
            try:
                taken = self._take(save)
            except PlanError as error:
                errors.append(error)
                continue
            for error in errors:
                self._say(f"passed over a newer save: {error}")
            return taken
        if errors:
            raise errors[0]
        self._say(f"no save in {self.job.save}: training begins anew")
        return None

    def _take(self, save: Path) -> Path:
        extra = self.engine.load(save)
        self._say(f"going on from {save}: {self.engine.step_index} steps are made")
        if self.job.save is not None and save.resolve().parent == Path(self.job.save).resolve():
            self._saved = self.engine.step_index
        for name, value in self.extra.items():
            if name in extra and extra[name] != value:
                self._say(f"{name} was {extra[name]} when {save} was written, and is {value} now")
        return save

    def _begin(self) -> None:
        """A save that goes on beside the next steps; those that the one before has made needless go."""
        assert self.job.save is not None
        self._await()
        try:
            self._prune()
            self.engine.save(self.job.save, wait=False, extra=self.extra)
        except PlanError as error:
            self._warn(self.engine.step_index, error)
        else:
            self._saved = self.engine.step_index

    def _await(self) -> None:
        """Until the last save is on the disk, or has failed."""
        try:
            self.engine.wait_saves()
        except PlanError as error:
            self._warn(self._saved, error)
            self._saved = None

    def _warn(self, step: int | None, error: PlanError) -> None:
        self._say(f"warning: step {step} is not saved: {error}")

    def _prune(self) -> None:
        with agreed(self.engine.groups):
            if self.job.keep is not None and self.job.save is not None and self.engine.groups.rank == 0:
                prune(self.job.save, self.job.keep)

    def _say(self, text: str) -> None:
        if self.engine.groups.rank == 0:
            print(text, file=sys.stderr, flush=True)
