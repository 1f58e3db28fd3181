"""Show training: a live line in a terminal, plain lines elsewhere, one JSON object a step in the log."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import IO, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

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

    def __enter__(self) -> Self:
        if self.enabled and self.log_path:
            self.log = open(self.log_path, "w")
        if self.enabled and sys.stdout.isatty():
            columns = ("step", MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
            self.bar = Bar(*columns, TimeRemainingColumn())
            self.task = self.bar.add_task("train", total=self.num_steps, text="")
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()
        if self.log:
            self.log.close()

    def show(self, row: StepRow) -> None:
        if not self.enabled:
            return
        if self.log:
            self.log.write(json.dumps(dataclasses.asdict(row)) + "\n")
            self.log.flush()
        line = f"step {row.step:>{len(str(self.num_steps))}}  {format_row(row)}"
        if self.bar:
            self.bar.update(self.task, advance=1, text=format_row(row))
        if self.bar and self.every_step:
            self.bar.console.print(line, highlight=False)
        elif not self.bar:
            print(line, flush=True)


def format_row(row: StepRow) -> str:
    """``loss 5.5561  grad norm 1.932  lr 2.00e-04  tokens/s 4321``, and the single process where it runs beside."""
    text = f"loss {row.loss:.6f}  grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  tokens/s {row.tokens_per_s:.0f}"
    if row.skipped:
        text += "  skipped"
    if row.one_process_loss is None:
        return text
    return f"{text}  |  one process {row.one_process_loss:.6f}  difference {abs(row.loss - row.one_process_loss):.1e}"
