"""One step, in the log and on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.report.pace import Planned
from runtime.report.step_report import StepReport


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of the log. None: there is no such figure in this run, or it is not known yet.

    ``imbalance``: of experts, the most tokens over the mean; ``dropped``: the share of choices that found no slot.
    ``one_process_loss``: of the single process, if it runs too. ``slow_rank``: the rank that others wait for, and the
    cost. ``loss_scale``: that the step ran with. ``validation_loss``: after this step, if due.
    ``step_seconds``: of the step. ``data_share``: the batch's share of the time of a step with its batch.
    ``flops_per_s``: of one device, model FLOPs of forward and backward over ``step_seconds``;
    ``peak_share``: its share of a device's peak in the cluster file. ``memory_bytes``: the most that a rank has
    held. ``bubble``: measured; ``planned_bubble``: of the plan's schedule. ``seconds_left``: until the last step.
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
