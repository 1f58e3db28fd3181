"""Show training: a live line in a terminal, plain lines elsewhere, one JSON object a step in the log."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from planner.errors import PlanError, Where
from runtime.report.step_report import StepRow


class Progress:
    """Owns the live line and the open log; shows and writes nothing unless ``enabled`` (rank 0).

    ``every_step`` keeps a line of every step in a terminal too.
    """

    def __init__(self, num_steps: int, log: str | None, *, enabled: bool = True, every_step: bool = False) -> None:
        self.enabled, self.every_step = enabled, every_step
        self.num_steps, self.log_path = num_steps, log
        self.log: IO[str] | None = None
        self.bar: Bar | None = None
        self._first = 0

    def from_step(self, step: int) -> Self:
        """``step`` steps were made by an earlier run: the line begins there, and the log keeps their rows."""
        self._first = step
        return self

    def __enter__(self) -> Self:
        if self.enabled and self.log_path:
            kept = _rows_until(self.log_path, self._first)
            self.log = open(self.log_path, "w")
            self.log.writelines(kept)
        if self.enabled and sys.stdout.isatty():
            columns = ("step", MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
            self.bar = Bar(*columns, TimeRemainingColumn())
            self.task = self.bar.add_task("train", total=self.num_steps, completed=self._first, text="")
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()
        if self.log:
            with suppress(OSError):  # what could not be written has been told
                self.log.close()

    def _note(self, row: StepRow) -> None:
        """Raises PlanError, naming the log, where it cannot be written."""
        if self.log is None:
            return
        try:
            self.log.write(json.dumps(dataclasses.asdict(row)) + "\n")
            self.log.flush()
        except OSError as error:
            raise _cannot_write(self.log_path, error) from error

    def show(self, row: StepRow) -> None:
        if not self.enabled:
            return
        self._note(row)
        line = f"step {row.step:>{len(str(self.num_steps))}}  {format_row(row)}"
        if self.bar:
            self.bar.update(self.task, advance=1, text=format_row(row))
        if self.bar and self.every_step:
            self.bar.console.print(line, highlight=False)
        elif not self.bar:
            print(line, flush=True)


def _cannot_write(log: str | None, error: OSError) -> PlanError:
    return PlanError(
        f"cannot write the log: {error.strerror}", where=Where(file=log or ""), fix="free space there, or log elsewhere"
    )


def _rows_until(log: str, step: int) -> list[str]:
    """Of an earlier run's log, the lines of the steps up to ``step``; the later ones will be made again."""
    if not step or not Path(log).is_file():
        return []
    return [line for line in Path(log).read_text().splitlines(keepends=True) if _step_of(line) <= step]


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return inf  # a line that a kill cut short


def format_row(row: StepRow) -> str:
    """``loss 5.5561  grad norm 1.932  lr 2.00e-04  tokens/s 4321``, and more where there is more to say.

    ``experts 1.31×``: the fullest expert has so much more than the mean. ``dropped 3.1 %``: of the choices that tokens
    made of experts. Last, the single process that runs beside.
    """
    text = f"loss {row.loss:.6f}  grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  tokens/s {row.tokens_per_s:.0f}"
    if row.imbalance is not None:
        text += f"  experts {row.imbalance:.2f}×"
    if row.dropped is not None:
        text += f"  dropped {100 * row.dropped:.1f} %"
    if row.skipped:
        text += "  skipped"
    if row.slow_rank:
        text += f"  {row.slow_rank}"
    if row.one_process_loss is None:
        return text
    return f"{text}  |  one process {row.one_process_loss:.6f}  difference {abs(row.loss - row.one_process_loss):.1e}"
