"""Show training while it runs: one live line in a terminal, plain lines elsewhere; a log and TensorBoard beside."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from runtime.report.line import Unchanging, format_row
from runtime.report.step_row import StepRow

_BAR = 12  # characters
_WIDE = 60  # a terminal with less has no bar
_REFRESHES = 4  # a second


class Sink(Protocol):
    """A destination of each step's figures beside the screen. ``own``: further ones, by the user's names."""

    def write(self, row: StepRow, own: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class LiveLine:
    """``step 12/100 ━━━─── loss 5.5561 …``: as much of the last step as its terminal has room for, in one line."""

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
    """Owns the live line, and closes its sinks; shows and writes nothing unless ``enabled`` (rank 0).

    ``first``: the steps that an earlier run has made. ``every_step`` keeps a line of every step in a terminal too;
    ``quiet`` shows none, and the sinks have them.
    ``console``: the output; stdout if not given.
    """

    def __init__(
        self,
        num_steps: int,
        sinks: Iterable[Sink] = (),
        *,
        first: int = 0,
        enabled: bool = True,
        every_step: bool = False,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.enabled, self.every_step, self.quiet, self.num_steps = enabled, every_step, quiet, num_steps
        self.sinks = tuple(sinks)
        self._unchanging = Unchanging()
        self._console = console
        self._line = LiveLine(num_steps, first)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        is_terminal = sys.stdout.isatty() if self._console is None else self._console.is_terminal
        if self.enabled and is_terminal and not self.quiet:
            self._live = Live(self._line, console=self._console, refresh_per_second=_REFRESHES)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        for sink in self.sinks:
            sink.close()

    def show(self, row: StepRow, own: Mapping[str, float] = MappingProxyType({})) -> None:
        """Raises PlanError if a sink cannot be written."""
        if not self.enabled:
            return
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
