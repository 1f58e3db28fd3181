"""The row of a step: figures of its report, next to those of the plan."""

from __future__ import annotations

from runtime.report.pace import Planned
from runtime.report.step_report import StepReport
from runtime.report.step_row import StepRow


def make_row(
    step: int,
    report: StepReport,
    planned: Planned,
    *,
    one_process_loss: float | None = None,
    data_seconds: float = 0.0,
    seconds_left: float | None = None,
    validation_loss: float | None = None,
) -> StepRow:
    """``data_seconds``: the time to make the step's batch. Waits for the device if the step still runs."""
    is_alone = one_process_loss is None  # else rank 0 trains the single process too: that others wait for it is no news
    seconds, bubble = report.seconds, report.bubble
    flops_per_s = planned.flops / seconds if planned.flops and seconds else None
    return StepRow(
        step,
        report.loss,
        report.grad_norm,
        report.lr,
        report.tokens_per_s,
        report.skipped,
        imbalance=report.imbalance if report.expert_tokens else None,
        dropped=report.dropped_share if report.drops else None,
        one_process_loss=one_process_loss,
        slow_rank=str(report.slow_rank) if report.slow_rank is not None and is_alone else None,
        loss_scale=report.loss_scale,
        validation_loss=validation_loss,
        step_seconds=seconds or None,
        data_share=data_seconds / (data_seconds + seconds) if seconds else None,
        flops_per_s=flops_per_s,
        peak_share=flops_per_s / planned.peak if flops_per_s and planned.peak else None,
        memory_bytes=report.memory_bytes,
        bubble=bubble,
        planned_bubble=planned.bubble if bubble is not None else None,
        seconds_left=seconds_left,
    )
