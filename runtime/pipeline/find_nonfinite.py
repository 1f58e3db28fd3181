"""Run a step again with every value looked at, and agree on the first one that is NaN or infinite.

    parameters before the step -> forwards and backwards, op by op -> sums of gradients

The same dropout is drawn, as it depends on the step and the microbatch alone; nothing is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from passes.stage_module import StageModule
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.pipeline.executor import Executor, Step
from runtime.pipeline.nonfinite import NonFinite, Seen, Watch, first_of, worst


class Before(Protocol):
    """The tensors of this rank that were not finite in the step, before ranks exchanged them: "NaN" or "infinity" by
    name. ``from_others``: parameters with a bad part that may have come from other ranks in the last update.
    """

    @property
    def parameters(self) -> Mapping[str, str]: ...
    @property
    def from_others(self) -> Collection[str]: ...
    @property
    def gradients(self) -> Mapping[str, str]: ...


def find_nonfinite(
    executor: Executor, step: Step, groups: Groups, gradients: Callable[[], dict[str, Tensor]], before: Before
) -> NonFinite | None:
    """The first value of ``step`` that is not finite; the same on every rank, which all call it.

    ``gradients``: finishes the sums of gradients, and gives this rank's part of them. Buffers are as before
    afterwards.
    """
    watch = Watch(groups.rank, step.first_microbatch)
    _look_at_parameters(watch, executor.stages, before)
    with _same_buffers(executor.stages), watch.over(executor):
        executor.run(step)
    found = first_of(all_gather_json(groups, watch.seen.to_json(), Seen.of_json))
    summed = gradients()
    if found is not None:
        return found
    for name, gradient in summed.items():
        if bad := worst(gradient):
            watch.gradient_sum(name, bad)
    for name, bad in before.gradients.items():
        watch.gradient_before(name, bad)
    return first_of(all_gather_json(groups, watch.seen.to_json(), Seen.of_json))


def _look_at_parameters(watch: Watch, stages: Sequence[StageModule], before: Before) -> None:
    """Check parameters before the exchange between ranks, and now: a later NaN is on all ranks."""
    for name, bad in before.parameters.items():
        watch.parameter(name, bad, int(name in before.from_others))
    for stage in stages:
        for parameter in stage.parameters:
            if bad := worst(stage.parameter(parameter.fqn).data):
                watch.parameter(parameter.fqn, bad, 2)
        for fqn in stage.buffers:
            if (bad := worst(stage.module.get_buffer(stage.attributes[fqn]))) == "NaN":  # infinity may mask something
                watch.parameter(fqn, bad, 2)


@contextmanager
def _same_buffers(stages: Sequence[StageModule]) -> Iterator[None]:
    """Restores the buffers that forwards write."""
    buffers = [stage.module.get_buffer(stage.attributes[fqn]) for stage in stages for fqn in stage.buffers]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
