"""Show the progress of training: one live line in a terminal, plain lines elsewhere; a log and TensorBoard beside it.

The parts of a line have priorities, and a narrow terminal omits those of low priority.

loss 5.556100  grad norm 1.932  lr 2.00e-04  tokens/s 4321  0:42 left  1.2 GFLOP/s (3.1 %)  310 MiB  bubble 31 % …
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from planner.tables.sizes import format_bytes
from runtime.report.log import Log, StepRow, TensorBoard, WandB

_BAR = 12  # characters
_WIDE = 60  # a terminal with less has no bar
_REFRESHES = 4  # a second
_ALWAYS = 0  # the rank of a part that is shown at any width
_MUCH_DATA = 0.02  # minimum data_share that is shown
Sink = Log | TensorBoard | WandB
_UNITS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))


class LiveLine:
    """``step 12/100 ━━━─── loss 5.5561 …``: as many parts of the last step as fit into one line of the terminal."""

    def __init__(self, num_steps: int, first: int) -> None:
        self.num_steps, self.step = num_steps, first
        self.row: StepRow | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        text.append(f"step {self.step}/{self.num_steps} ")
        if options.max_width >= _WIDE:
            done = round(_BAR * min(1.0, self.step / self.num_steps))
            text.append("━" * done, "green").append("━" * (_BAR - done), "dim").append(" ")
        if self.row is not None:
            text.append(format_row(self.row, options.max_width - text.cell_len))
        yield text


class Progress:
    """The progress of a run. Owns the live line, and closes the sinks.

    ``first``: number of steps of an earlier run. ``every_step``: print a line of every step in a terminal too;
    ``quiet``: print none, but write to the sinks. ``console``: the output; default: stdout.
    """

    def __init__(
        self,
        num_steps: int,
        sinks: Iterable[Sink] = (),
        *,
        first: int = 0,
        every_step: bool = False,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.every_step, self.quiet, self.num_steps = every_step, quiet, num_steps
        self.sinks = tuple(sinks)
        self._unchanging = Unchanging()
        self._console = console
        self._line = LiveLine(num_steps, first)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        is_terminal = sys.stdout.isatty() if self._console is None else self._console.is_terminal
        if is_terminal and not self.quiet:
            self._live = Live(self._line, console=self._console, refresh_per_second=_REFRESHES)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        for sink in self.sinks:
            sink.close()

    def show(self, row: StepRow, own: Mapping[str, float] = MappingProxyType({})) -> None:
        """Show a step, and write it to the sinks. Raises PlanError if a sink cannot be written."""
        for sink in self.sinks:
            sink.write(row, own)
        if self.quiet:
            return
        self._line.step, self._line.row = row.step, row
        if self._live is None or self.every_step:
            self._print(f"step {row.step:>{len(str(self.num_steps))}}  {format_row(self._unchanging.without(row))}")

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)


def parts_of(row: StepRow) -> list[tuple[str, int]]:
    """Return the parts of a step's line, in order, with a rank each: the largest rank is omitted first."""
    data, beside, alone = row.data_share or 0.0, "", row.one_process_loss
    if alone is not None:
        beside = f"|  one process {alone:.6f}  difference {abs(row.loss - alone):.1e}"
    found = [
        (f"loss {row.loss:.6f}", _ALWAYS),
        (f"grad norm {row.grad_norm:.3f}", 3),
        (f"lr {row.lr:.2e}", 4),
        ("" if row.validation_loss is None else f"validation {row.validation_loss:.6f}", 1),
        ("" if row.loss_scale is None else f"scale {row.loss_scale:g}", 7),
        (f"tokens/s {row.tokens_per_s:.0f}", 2),
        (_speed(row), 6),
        ("" if row.memory_bytes is None else format_bytes(row.memory_bytes), 8),
        (_bubble(row), 9),
        (f"data {100 * data:.0f} %" if data >= _MUCH_DATA else "", 1),
        ("" if row.imbalance is None else f"experts {row.imbalance:.2f}×", 5),
        ("" if row.dropped is None else f"dropped {100 * row.dropped:.1f} %", 5),
        ("skipped" if row.skipped else "", 1),
        (row.slow_rank or "", 1),
        (f"{clock(row.seconds_left)} left" if row.seconds_left else "", 2),
        (beside, 1),
    ]
    return [part for part in found if part[0]]


def format_row(row: StepRow, width: int | None = None) -> str:
    """Return the parts in one line of at most ``width`` characters, unless the first part is longer."""
    parts = parts_of(row)
    while True:
        line = "  ".join(text for text, _ in parts)
        if width is None or len(line) <= width or not any(rank for _, rank in parts):
            return line
        parts.remove(max(parts, key=itemgetter(1)))


class Unchanging:
    """Omits figures that have not changed since the line before, as they are constant in most of a run. Owns the last
    shown values. Memory counts as changed if it differs by 1 %; the planned bubble is shown once.
    """

    def __init__(self) -> None:
        self._memory, self._scale = 0, 0.0
        self._is_bubble_told = False

    def without(self, row: StepRow) -> StepRow:
        memory = row.memory_bytes or 0
        if abs(memory - self._memory) <= 0.01 * self._memory:
            row = replace(row, memory_bytes=None)
        else:
            self._memory = memory
        if row.loss_scale == self._scale:
            row = replace(row, loss_scale=None)
        self._scale = row.loss_scale or self._scale
        if self._is_bubble_told:
            row = replace(row, planned_bubble=None)
        self._is_bubble_told |= row.bubble is not None
        return row


def clock(seconds: float) -> str:
    """Return a duration as ``0:42``, ``1:02:03`` or ``2 d 03:04:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _speed(row: StepRow) -> str:
    if not row.flops_per_s:
        return ""
    size, unit = next((of for of in _UNITS if row.flops_per_s >= of[0]), _UNITS[-1])
    share = "" if row.peak_share is None else f" ({100 * row.peak_share:.1f} %)"
    return f"{row.flops_per_s / size:.3g} {unit}{share}"


def _bubble(row: StepRow) -> str:
    if row.bubble is None:
        return ""
    planned = "" if row.planned_bubble is None else f" (planned {100 * row.planned_bubble:.0f} %)"
    return f"bubble {100 * row.bubble:.0f} %{planned}"
