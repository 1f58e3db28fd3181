"""A step in words: parts with a rank; a narrow terminal shows the first ones.

loss 5.556100  grad norm 1.932  lr 2.00e-04  tokens/s 4321  0:42 left  1.2 GFLOP/s (3.1 %)  310 MiB  bubble 31 % …
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.tables.sizes import format_bytes
from runtime.report.step_row import StepRow

_ALWAYS = 0  # shown at any width
_MUCH_DATA = 0.02  # of a step: a batch that takes longer to make is reported
_UNITS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))


@dataclass(frozen=True, slots=True)
class Part:
    """``rank``: the larger, the sooner it is left out."""

    text: str
    rank: int


def parts_of(row: StepRow) -> list[Part]:
    """The parts of a step's line, in order."""
    found = [
        Part(f"loss {row.loss:.6f}", _ALWAYS),
        Part(f"grad norm {row.grad_norm:.3f}", 3),
        Part(f"lr {row.lr:.2e}", 4),
        Part("" if row.validation_loss is None else f"validation {row.validation_loss:.6f}", 1),
        Part("" if row.loss_scale is None else f"scale {row.loss_scale:g}", 7),
        Part(f"tokens/s {row.tokens_per_s:.0f}", 2),
        Part(_speed(row), 6),
        Part(_memory(row), 8),
        Part(_bubble(row), 9),
        Part(_data(row), 1),
        Part("" if row.imbalance is None else f"experts {row.imbalance:.2f}×", 5),
        Part("" if row.dropped is None else f"dropped {100 * row.dropped:.1f} %", 5),
        Part("skipped" if row.skipped else "", 1),
        Part(row.slow_rank or "", 1),
        Part(f"{clock(row.seconds_left)} left" if row.seconds_left else "", 2),
        Part(_beside(row), 1),
    ]
    return [part for part in found if part.text]


def format_row(row: StepRow, width: int | None = None) -> str:
    """The parts in one line; of at most ``width`` characters, unless its first part is longer."""
    parts = parts_of(row)
    while width is not None and len(_joined(parts)) > width and any(part.rank for part in parts):
        parts.remove(max(parts, key=lambda part: part.rank))
    return _joined(parts)


class Unchanging:
    """Leaves out of a row figures that the line before has shown: they are constant in most of a run. Owns the last
    shown values. Memory counts as changed once it differs by 1 %; the planned bubble is shown once.
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
    """``0:42``, ``1:02:03``; of days ``2 d 03:04:05``."""
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


def _memory(row: StepRow) -> str:
    return "" if row.memory_bytes is None else format_bytes(row.memory_bytes)


def _bubble(row: StepRow) -> str:
    if row.bubble is None:
        return ""
    planned = "" if row.planned_bubble is None else f" (planned {100 * row.planned_bubble:.0f} %)"
    return f"bubble {100 * row.bubble:.0f} %{planned}"


def _data(row: StepRow) -> str:
    return f"data {100 * row.data_share:.0f} %" if row.data_share and row.data_share >= _MUCH_DATA else ""


def _beside(row: StepRow) -> str:
    if row.one_process_loss is None:
        return ""
    return f"|  one process {row.one_process_loss:.6f}  difference {abs(row.loss - row.one_process_loss):.1e}"


def _joined(parts: list[Part]) -> str:
    return "  ".join(part.text for part in parts)
