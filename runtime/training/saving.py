"""The saves of a run: when they are made, which of them stay, and from which one a run resumes."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from passes.errors import PlanError
from runtime.checkpoint.lines import Line, line_of_run
from runtime.checkpoint.saves import by_newest, on_line, owned, prune, saves_in, without_manifest
from runtime.distributed.agreement import agreed, broadcast_json, of_kind
from runtime.engine.engine import Engine
from runtime.training.job import Job, check_saves
from runtime.training.options import AUTO


@dataclass(frozen=True, slots=True)
class _Origin:
    """The saves from which a run may resume: it takes the first good one; without one it starts afresh.

    ``own``: those of them that are of the run's own line, or of one that it takes over. ``skipped``: why newer ones
    are not among them. ``is_named``: the user has named the save, and no other will do.
    """

    saves: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    is_named: bool = False


class RunSaves:
    """Saves of one run. Owns, on rank 0, the right to write to their directory.

    ``extra``: stored in each save, and compared when a run resumes from it; ``position``: gives more to store. If a
    save fails, it is reported and the training continues; the last one must be good.
    """

    def __init__(self, engine: Engine, job: Job, extra: dict[str, Any]) -> None:
        self.engine, self.job, self.extra = engine, job, extra
        self._stack = ExitStack()
        self.position: Callable[[], dict[str, Any]] = dict  # of a stream
        self.taken: dict[str, Any] = {}  # the extra data of the save from which the run resumes
        self.is_asked = False  # for a save after this step
        self._saved: int | None = None
        self._line = line_of_run(os.environ)

    def __enter__(self) -> Self:
        with agreed(self.engine.groups):
            if self.engine.groups.rank == 0:
                check_saves(self.job, goes_on=bool(self._of_an_earlier_start()))
                if self.job.save is not None:
                    self._stack.enter_context(owned(self.job.save))
        with agreed(self.engine.groups):
            if self.job.save is not None and not Path(self.job.save).is_dir():
                what = f"{self.job.save} is not the directory of rank 0, which has been made"
                raise PlanError(what, where="--save", fix="name one directory that all ranks share, on every rank")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def after_step(self) -> bool:
        """Save if this step is one to be saved, without a wait for the disk; whether it was."""
        every = self.job.save_every
        is_due = every is not None and self.engine.step_index % every == 0
        is_due = self.job.save is not None and (is_due or self.is_asked)
        self.is_asked = False
        if is_due:
            self._begin()
        return is_due

    def finish(self) -> None:
        """Save the last step if it is not saved yet, and return when all saves are on the disk."""
        if self.job.save is None:
            return
        self._await()
        if self._saved != self.engine.step_index:
            self.engine.save(self.job.save, extra=self.extra | self.position())
        self._prune()
        self._say(f"saved step {self.engine.step_index} in {self.job.save}")

    def resumed(self) -> Path | None:
        """Resume the training from a save; returns the save, None if there is none yet.

        A restart resumes from the last save of this run, if there is one. ``auto`` skips damaged saves and names them.
        Raises PlanError on every rank if the named save, or every one that there is, cannot be taken.
        """
        with agreed(self.engine.groups):
            found = self._origin() if self.engine.groups.rank == 0 else None
        origin = broadcast_json(self.engine.groups, found, of_kind(_Origin))
        taken = self._first_good(origin)
        line = self.engine.saver.line
        if taken is None:
            self.engine.saver.line = Line(id=self._line)
        elif str(taken) not in origin.own:
            self.engine.saver.line = line.branch(self._line, self.engine.step_index)
        if self.job.save is not None and self.engine.groups.rank == 0:
            self._warn_of_others(Path(self.job.save), self.engine.saver.line)
        return taken

    def _of_an_earlier_start(self) -> list[Path]:
        """The saves that this run has made before a launcher started its ranks again, the newest first."""
        if self.job.save is None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            return []
        return on_line(saves_in(self.job.save), Line(id=self._line))[0][::-1]

    def _origin(self) -> _Origin:
        own = tuple(map(str, self._of_an_earlier_start()))
        if self.job.resume is None:
            return _Origin(own, own)
        if self.job.resume != AUTO:
            return _Origin((*own, self.job.resume), own, is_named=not own)
        assert self.job.save is not None
        saves, skipped = by_newest(self.job.save)
        found = tuple(map(str, saves))
        if not found and not skipped:
            self._say(f"no save in {self.job.save}: training starts from step 1")
        return _Origin(found, found, tuple(map(str, skipped)))

    def _first_good(self, origin: _Origin) -> Path | None:
        first, skipped = None, list(origin.skipped)
        for save in map(Path, origin.saves):
            try:
                taken = self._take(save)
            except PlanError as error:
                if origin.is_named:
                    raise
                first = first or error
                skipped.append(str(error))
                continue
            for told in skipped:
                self._say(f"lost: {told}")
            return taken
        if first is not None or skipped:
            raise first or PlanError(
                skipped[0].partition("\n")[0], where=self.job.save, fix="name a save with --resume DIR"
            )
        return None

    def _take(self, save: Path) -> Path:
        extra = self.taken = self.engine.load(save)
        self._say(f"resuming from {save}: {self.engine.step_index} steps are done")
        if self.job.save is not None and save.resolve().parent == Path(self.job.save).resolve():
            self._saved = self.engine.step_index
        for name, value in self.extra.items():
            if name in extra and extra[name] != value:
                self._say(f"{name} was {extra[name]} when {save} was written, and is {value} now")
        return save

    def _warn_of_others(self, directory: Path, line: Line) -> None:
        """Name the directories beside the saves of this run that are ignored."""
        if others := on_line(saves_in(directory), line)[1]:
            self._say(
                f"warning: {_listed(others)} in {directory} belong to another line of saves: restarts and --keep "
                "ignore them"
            )
        if incomplete := without_manifest(directory):
            self._say(f"warning: {_listed(incomplete)} in {directory} have no manifest and are not saves")

    def _begin(self) -> None:
        """A save that runs beside the next steps; saves that are no longer needed are removed."""
        assert self.job.save is not None
        self._await()
        self._prune()
        try:
            self.engine.save(self.job.save, wait=False, extra=self.extra | self.position())
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
        if self.job.keep is not None and self.job.save is not None:
            prune_on_rank_0(self.engine, self.job.save, self.job.keep)

    def _say(self, text: str) -> None:
        say(text, leads=self.engine.groups.rank == 0)


def say(text: str, *, leads: bool) -> None:
    """One line of rank 0."""
    if leads and text:
        print(text, file=sys.stderr, flush=True)


def prune_on_rank_0(engine: Engine, directory: str, keep: int) -> None:
    """Old saves that cannot be removed only take space: training and its saves continue."""
    if engine.groups.rank == 0:
        try:
            prune(directory, keep, engine.saver.line)
        except PlanError as error:
            say(f"warning: {error}", leads=True)


def _listed(saves: list[Path], most: int = 5) -> str:
    return ", ".join(save.name for save in saves[:most]) + (f" and {len(saves) - most} more" if saves[most:] else "")
