"""Repeats a step, checks every value, and agrees on the first one that is NaN or infinite.

    parameters before the step -> forwards and backwards, op by op -> sums of gradients

Dropout is the same, since it depends only on the step and the microbatch; nothing is updated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from passes.base import StageModule
from runtime.distributed.agreement import all_gather_json, of_kind
from runtime.distributed.groups import Groups
from runtime.optimizer.unmixed import Bad
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.pipeline.executor import Executor, Step
from runtime.pipeline.nonfinite import ONCE, PARAMETER, SUM, NonFinite, Seen, Watch, first_of, worst


def find_nonfinite(
    executor: Executor, step: Step, groups: Groups, optimizer: DistributedOptimizer, before: Bad
) -> NonFinite | None:
    """Return the first value of ``step`` that is not finite, the same on every rank. All ranks must call it.

    ``before``: tensors that were not finite on this rank before ranks exchanged them. Buffers are restored.
    """
    watch = Watch(groups.rank, step.first_microbatch)
    _look_at_parameters(watch, executor.stages, before)
    with _same_buffers(executor.stages), watch.over(executor):
        executor.run(step)
    first = first_of(all_gather_json(groups, watch.seen, of_kind(Seen)))
    optimizer.reduce_gradients()
    if first is not None:
        return first
    for name, gradient in optimizer.own_gradients().items():
        if bad := worst(gradient):
            watch.note(SUM, name, bad)
    for name, bad in before.gradients.items():
        watch.note(ONCE, name, bad)
    return first_of(all_gather_json(groups, watch.seen, of_kind(Seen)))


def _look_at_parameters(watch: Watch, stages: Sequence[StageModule], before: Bad) -> None:
    """Check parameters before the exchange between ranks, and now: a later NaN is on all ranks. Places: 0 if others may
    have it from this rank, 1 if it was there before the exchange, 2 if now.
    """
    for name, bad in before.parameters.items():
        watch.note(PARAMETER, name, bad, int(name in before.from_others))
    for stage in stages:
        for parameter in stage.parameters:
            if bad := worst(stage.parameter(parameter.fqn).data):
                watch.note(PARAMETER, parameter.fqn, bad, 2)
        for fqn in stage.buffers:
            if (bad := worst(stage.module.get_buffer(stage.attributes[fqn]))) == "NaN":  # a mask may contain infinity
                watch.note(PARAMETER, fqn, bad, 2)


@contextmanager
def _same_buffers(stages: Sequence[StageModule]) -> Iterator[None]:
    """Restore the buffers that forwards write, after the block."""
    buffers = [stage.module.get_buffer(stage.attributes[fqn]) for stage in stages for fqn in stage.buffers]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
