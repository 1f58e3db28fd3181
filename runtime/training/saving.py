"""The saves of a run: when to save, which saves to keep, and from which one to resume."""

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
    """The saves from which a run may resume, in order: it uses the first intact one, or starts from step 1.

    ``own``: those on the run's own line of saves, or on the line that it continues. ``skipped``: reasons why newer
    saves are not candidates. ``is_named``: the user has named the save, so that no other may be used.
    """

    saves: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    is_named: bool = False


class RunSaves:
    """The saves of one run. Rank 0 holds a lock on their directory.

    ``extra``: stored in each save, and compared when a run resumes from it. ``position``: returns further data to
    store. A save that fails is reported, and training continues, except at the last save.
    """

    def __init__(self, engine: Engine, job: Job, extra: dict[str, Any]) -> None:
        self.engine, self.job, self.extra = engine, job, extra
        self._stack = ExitStack()
        self.position: Callable[[], dict[str, Any]] = dict  # the position of a stream
        self.taken: dict[str, Any] = {}  # the extra data of the save from which the run resumes
        self.is_asked = False  # a callback asked for a save after this step
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
                what = f"{self.job.save} does not exist on this rank, but rank 0 has created it"
                raise PlanError(what, where="--save", fix="give every rank the same directory on a shared file system")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def after_step(self) -> bool:
        """Start a save if one is due after this step, without waiting for the disk; return whether it was due."""
        every = self.job.save_every
        is_due = every is not None and self.engine.step_index % every == 0
        is_due = self.job.save is not None and (is_due or self.is_asked)
        self.is_asked = False
        if is_due:
            self._begin()
        return is_due

    def finish(self) -> None:
        """Save the last step if it is not saved yet, and wait until all saves are on disk."""
        if self.job.save is None:
            return
        self._await()
        if self._saved != self.engine.step_index:
            self.engine.save(self.job.save, extra=self.extra | self.position())
        self._prune()
        self._say(f"saved step {self.engine.step_index} in {self.job.save}")

    def resumed(self) -> Path | None:
        """Load the save from which the run resumes, and return it; None if there is none yet.

        A restart resumes from the last save of this run, if there is one. ``auto`` skips damaged saves and reports
        them. Raises PlanError on every rank if the named save, or every save in the directory, cannot be loaded.
        """
        with agreed(self.engine.groups):
            saves = self._origin() if self.engine.groups.rank == 0 else None
        origin = broadcast_json(self.engine.groups, saves, of_kind(_Origin))
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
        """Return the saves of this run from before a restart by a launcher, the newest first."""
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
        own = tuple(map(str, saves))
        if not own and not skipped:
            self._say(f"no save in {self.job.save}: training starts from step 1")
        return _Origin(own, own, tuple(map(str, skipped)))

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
            for reason in skipped:
                self._say(f"skipped: {reason}")
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
        """Print the names of the directories beside this run's saves that are ignored."""
        if others := on_line(saves_in(directory), line)[1]:
            self._say(
                f"warning: {_listed(others)} in {directory} belong to another line of saves: restarts and --keep "
                "ignore them"
            )
        if incomplete := without_manifest(directory):
            self._say(f"warning: {_listed(incomplete)} in {directory} have no manifest and are not saves")

    def _begin(self) -> None:
        """Start a save that runs during the next steps, and remove saves that are no longer needed."""
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
        """Wait until the last save is on disk, or has failed."""
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
    """Print a line to stderr on rank 0 (``leads``)."""
    if leads and text:
        print(text, file=sys.stderr, flush=True)


def prune_on_rank_0(engine: Engine, directory: str, keep: int) -> None:
    """Remove old saves on rank 0. A failure is a warning: training and its saves continue."""
    if engine.groups.rank == 0:
        try:
            prune(directory, keep, engine.saver.line)
        except PlanError as error:
            say(f"warning: {error}", leads=True)


def _listed(saves: list[Path], most: int = 5) -> str:
    return ", ".join(save.name for save in saves[:most]) + (f" and {len(saves) - most} more" if saves[most:] else "")
