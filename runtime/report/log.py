"""Logs of a run: a line of JSON for each step, flushed at once (docs/watching.md lists the keys); TensorBoard and
Weights & Biases, with the same names; and a picture of the loss. All except the log need optional packages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any

from passes.errors import Where, refusing
from planner.files.atomic import replaced_file
from planner.files.text import writing
from planner.frozen_plan import Plan
from runtime.report.step_report import StepReport

_FIX = "free space there, or log to another place"


_RECENT = 20  # number of steps from which the remaining time is estimated


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's figures of a step. ``flops``: model FLOPs of forward and backward on one device, without
    recomputation; ``peak``: FLOPs per second of the device, 0 without a cluster; ``bubble``: of the schedule.
    """

    flops: float
    peak: float
    bubble: float

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """Return the figures of a plan that can run."""
        bubble = plan.schedule.bubble_fraction
        return cls(plan.step_flops(), 0.0 if plan.cost is None else plan.cost.peak, bubble)


class Pace:
    """Owns the times at which the last steps were shown, and the seconds of the last batch."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.data_seconds = 0.0
        self._shown: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    @contextmanager
    def making_batch(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.data_seconds = time.perf_counter() - begun

    def seconds_left(self, step: int) -> float | None:
        """Return the estimated remaining seconds when ``step`` is shown; None at the first step, which is slow."""
        now = time.perf_counter()
        self._shown.append((step, now))
        first, begun = self._shown[0]
        return None if step == first else (now - begun) / (step - first) * (self.num_steps - step)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of the log. None: this run has no such figure, or it is not known yet.

    ``imbalance``: tokens of the busiest expert divided by the mean; ``dropped``: fraction of expert choices without a
    slot. ``one_process_loss``: with --compare. ``slow_rank``: the rank for which others wait, and the cost.
    ``loss_scale``: in this step. ``validation_loss``: after this step, if due. ``data_share``: fraction of the time of
    step and batch that making the batch takes. ``flops_per_s``: of one device, model FLOPs of forward and backward over
    ``step_seconds``; ``peak_share``: as a fraction of the peak in the cluster file. ``memory_bytes``: peak of the
    fullest rank. ``bubble``: measured; ``planned_bubble``: of the schedule. ``seconds_left``: until the last step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    skipped: bool = False
    imbalance: float | None = None
    dropped: float | None = None
    one_process_loss: float | None = None
    slow_rank: str | None = None
    loss_scale: float | None = None
    validation_loss: float | None = None
    step_seconds: float | None = None
    data_share: float | None = None
    flops_per_s: float | None = None
    peak_share: float | None = None
    memory_bytes: int | None = None
    bubble: float | None = None
    planned_bubble: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    """``loss``: of the first set. ``figures``: other losses and metrics, by their names in the log."""

    loss: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Seen:
    """The figures of a step that rank 0 has besides the engine's report. ``step``: its number, from 1.

    ``one_process_loss``: with --compare; ``data_seconds``: for making the batch; ``validation``: after the step, if
    due. ``place``: index of the batch's length among the lengths of the plan.
    """

    step: int
    one_process_loss: float | None = None
    data_seconds: float = 0.0
    validation: Validation | None = None
    place: int = -1


def make_row(report: StepReport, planned: Planned, seen: Seen, seconds_left: float | None = None) -> StepRow:
    """Return the row of a step. Waits for the device if the step still runs."""
    # with --compare the others always wait for rank 0, which trains the one process too: not worth reporting
    is_alone = seen.one_process_loss is None
    seconds, bubble = report.seconds, report.bubble
    flops_per_s = planned.flops / seconds if planned.flops and seconds else None
    return StepRow(
        step=seen.step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        lr=report.lr,
        tokens_per_s=report.tokens_per_s,
        skipped=report.skipped,
        imbalance=report.imbalance if report.expert_tokens else None,
        dropped=report.dropped_share if report.drops else None,
        one_process_loss=seen.one_process_loss,
        slow_rank=str(report.slow_rank) if report.slow_rank is not None and is_alone else None,
        loss_scale=report.loss_scale,
        validation_loss=None if seen.validation is None else seen.validation.loss,
        step_seconds=seconds or None,
        data_share=seen.data_seconds / (seen.data_seconds + seconds) if seconds else None,
        flops_per_s=flops_per_s,
        peak_share=flops_per_s / planned.peak if flops_per_s and planned.peak else None,
        memory_bytes=report.memory_bytes,
        bubble=bubble,
        planned_bubble=planned.bubble if bubble is not None else None,
        seconds_left=seconds_left,
    )


_KEYS = tuple(field.name for field in dataclasses.fields(StepRow))
SUFFIXES = (".png", ".svg", ".pdf")
_SIZE = (7.0, 4.0)  # inches
_FEW = 25  # up to this number of steps, the curve has a marker at each


class Log:
    """Owns the open log file. The steps up to ``first`` of an earlier run are kept; the first written step atomically
    replaces the later ones, so that a run that is killed before it loses nothing.

    Every method raises PlanError, with the file, if it cannot be written.
    """

    def __init__(self, path: str, first: int = 0) -> None:
        self.path, self._first, self._has_begun = path, first, False
        with writing("the log", Where(file=path), _FIX):
            self._file = open(path, "ab")  # noqa: SIM115 - closed by close()

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        line = json.dumps({name: getattr(row, name) for name in _KEYS} | dict(own)) + "\n"
        with writing("the log", Where(file=self.path), _FIX):
            if not self._has_begun:
                self._begin()
            self._file.write(line.encode())
            self._file.flush()

    def _begin(self) -> None:
        self._has_begun = True
        there = os.fstat(self._file.fileno())
        if not stat.S_ISREG(there.st_mode) or not there.st_size:
            return
        path = Path(os.path.realpath(self.path))
        with replaced_file(path) as new:
            new.writelines(_lines_until(path, self._first))
        self._file.close()
        self._file = path.open("ab")

    def close(self) -> None:
        with suppress(OSError):  # failed writes were reported before
            self._file.close()


def rows_until(path: str | None, step: int) -> list[StepRow]:
    """Return the logged steps of an earlier run up to ``step``; none without a log."""
    rows = [json.loads(line) for line in _lines_until(path, step)] if path else []
    return [StepRow(**{name: value for name, value in row.items() if name in _KEYS}) for row in rows]


def _lines_until(path: str | Path, step: int) -> Iterator[bytes]:
    """Yield the lines up to ``step`` one by one, because a log may be larger than memory."""
    if step and Path(path).is_file():
        with open(path, "rb") as file:
            for line in file:
                if _step_of(line) <= step:
                    yield line if line.endswith(b"\n") else line + b"\n"


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return inf  # a line that a kill truncated


def draw_curve(rows: Sequence[StepRow], path: str) -> None:
    """Write a picture of the loss over steps, with those of one process and validation, if any.

    Raises PlanError, with the file, if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points, style in _lines(rows):
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (mean over tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with writing("the picture", Where(file=path)), replaced_file(Path(os.path.realpath(path))) as file:
        figure.savefig(file, dpi=150, format=Path(path).suffix.lower().removeprefix("."))


def _lines(rows: Sequence[StepRow]) -> list[tuple[str, list[tuple[int, float]], dict[str, Any]]]:
    """Return label, points and style of each line. One process is dashed, so that equal lines are both visible."""
    marker = "o" if len(rows) <= _FEW else None
    wanted = (
        ("training", "loss", {"color": "C0", "linewidth": 2.0, "marker": marker, "markersize": 3.5}),
        ("one process", "one_process_loss", {"color": "black", "linewidth": 1.2, "linestyle": (0, (3, 3))}),
        ("validation", "validation_loss", {"color": "C1", "linewidth": 1.6, "marker": "s", "markersize": 4.0}),
    )
    found = []
    for label, name, style in wanted:
        points = [(row.step, value) for row in rows if (value := getattr(row, name)) is not None]
        if points:
            found.append((label, points, style))
    return found


class TensorBoard:
    """Owns the writer of a directory. Steps after ``first`` of an earlier run are purged, as they are repeated."""

    def __init__(self, directory: str, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=first + 1 if first else None)

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        for name, value in _figures(row, own).items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._writer.close()


_FIX_OF_WANDB = "log in by `wandb login`, set WANDB_MODE=offline, or remove --wandb"
_of_wandb = partial(refusing, "Weights & Biases", where="--wandb", fix=_FIX_OF_WANDB, of=(Exception,))


class WandB:
    """Owns a run of Weights & Biases. ``place``: PROJECT, or PROJECT/NAME; ``name``: of the run, if NAME is missing.

    ``run_id``: of the run to continue or begin. Errors of the package become a PlanError.
    """

    def __init__(self, place: str, name: str | None, config: Mapping[str, Any], run_id: str | None) -> None:
        project, _, own = place.partition("/")
        with _of_wandb():
            init = import_module("wandb").init
            self._run = init(project=project, name=own or name, config=dict(config), id=run_id, resume="allow")

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        with _of_wandb():
            self._run.log(_figures(row, own), step=row.step)

    def close(self) -> None:
        with _of_wandb():
            self._run.finish()


def _figures(row: StepRow, own: Mapping[str, float]) -> dict[str, float]:
    figures = {name: value for name, value in dataclasses.asdict(row).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in figures.items() if name != "step"} | dict(own)
