"""Handling of steps with NaN or Inf in loss or gradients: continue, or stop and report the origin.

An update with NaN or Inf changes nothing in either case. With a dynamic loss scale it is expected: the scale is halved
and the next step runs. It is an error only if the scale cannot become smaller.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from runtime.engine import Engine
from runtime.report.step_report import StepReport

MOST_SKIPPED = 100  # steps in a row, with `precision.nonfinite: skip` and no loss scale that would end it before


class NonFiniteError(RuntimeError):
    """Training cannot continue: loss or gradients of a step are NaN or infinite. The same on every rank."""


class NonFiniteGuard:
    """Looks at each report. Owns the number of steps that were skipped one after another.

    Every rank asks it about every step, in order; all of them stop at the same step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_skipped = engine, 0

    def check(self, batch: Mapping[str, Tensor], report: StepReport, step: int, *, local: bool = False) -> None:
        """``batch`` and ``report``: of the step with this index, the first of a training being 0.

        Raises NonFiniteError on every rank, with the first value of the step that is not finite.
        """
        self.num_skipped = self.num_skipped + 1 if report.skipped else 0
        if self.num_skipped and self._is_over():
            raise NonFiniteError(self._words(batch, report, step, local))

    def _is_over(self) -> bool:
        precision, scale = self.engine.spec.precision, self.engine.loss_scale
        if precision.loss_scale == "dynamic":
            return scale.is_exhausted or precision.nonfinite == "stop"
        return precision.nonfinite != "skip" or self.num_skipped >= MOST_SKIPPED

    def _words(self, batch: Mapping[str, Tensor], report: StepReport, step: int, local: bool) -> str:
        first = self.engine.find_nonfinite(batch, local=local, step=step)
        row = f" for {self.num_skipped} steps in a row" if self.num_skipped > 1 else ""
        figures = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}"
        found = first or "in a rerun, every value is finite: the step is not reproducible, or a sum overflowed"
        return (
            f"step {step + 1} has NaN or Inf{row} ({figures}); its update was skipped, and training stops\n  "
            f"{found}\n  fix: lower the learning rate, warm up, or clip; see docs/limits.md; set "
            "precision.nonfinite to continue after such steps"
        )
