"""Faults of scales and of the update: shares of the loss, denominators, loss scale, clipping, AdamW, its rate, mean."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from passes.ops import counts
from passes.ops.counts import GlobalSums
from passes.partition import writer
from passes.partition.loss.shares import _Rewriter
from passes.partition.typings.base import Form
from runtime.engine import batch_prep, update
from runtime.optimizer import flat, rules
from runtime.optimizer.main_shards import WeightAverage
from runtime.optimizer.scalars import LossScale
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.pipeline import executor
from tests.tools.planted import changes
from tests.tools.planted.fault import Fault, Function, Make


def _denominators_times(factor: float) -> Make:
    return lambda whole: lambda *args, **options: [count * factor for count in whole(*args, **options)]


def _without_dp(whole: Function) -> Function:
    """As if each dp rank had a batch of its own."""

    def counts(built: Any, *rest: Any, **options: Any) -> list[Tensor]:
        return [count / built.layout.dp for count in whole(built, *rest, **options)]

    return counts


def _of_one_rank(whole: Function) -> Function:
    """Counts of this rank's microbatches, as if they were the global batch."""

    def counts(built: Any, batch: Any, *, local: bool) -> list[Tensor]:
        program = built.program
        return program.totals(built.layout.microbatches(batch, program.count_inputs, built.groups.device, local=local))

    return counts


def _of_one_microbatch(whole: Function) -> Function:
    def counts(built: Any, *rest: Any, **options: Any) -> list[Tensor]:
        return [count / built.layout.num_microbatches for count in whole(built, *rest, **options)]

    return counts


def _num_microbatches_halved(whole: Function) -> Function:
    """Of means of equal sizes: each is divided by half the microbatches of the global batch."""

    def average(self: Any, node: Any) -> Any:
        total, self.total = self.total, self.total / 2
        try:
            return whole(self, node)
        finally:
            self.total = total

    return average


def _half_mean(rewrites: Any) -> Any:
    """The share of a mean over a cut dim is 1/(2n)."""

    def mean(scene: Any) -> None:
        scene.size *= 2
        rewrites[Form.MEAN](scene)

    return {**rewrites, Form.MEAN: mean}


def _half_seed(whole: Function) -> Function:
    return lambda loss, scale: whole(loss, None if scale is None else scale / 2)


def _half_value(whole: Any) -> Any:
    return property(lambda self: 1.0 if self.tensor is None else whole.fget(self) / 2)


def _half_divisor(whole: Function) -> Function:
    def divisor(self: Any, norm: Tensor, grad_scale: Any) -> Any:
        return whole(self, norm, grad_scale / 2 if isinstance(grad_scale, Tensor) else grad_scale)

    return divisor


def _without_clip(whole: Function) -> Function:
    def divisor(self: Any, norm: Tensor, grad_scale: Any) -> Any:
        return whole(self, norm.clamp(max=0.0), grad_scale)

    return divisor


def _clip_of_scaled_norm(whole: Function) -> Function:
    """The norm that is compared with the limit is still multiplied with the loss scale."""
    return lambda self, norm, grad_scale: whole(self, norm * grad_scale, grad_scale)


def _adamw(change: Make) -> Make:
    return lambda kernels: {**kernels, "adamw": rules._adam(change(rules.torch_adamw))}


def _given(**wrong: Any) -> Make:
    return lambda whole: lambda *args, **options: whole(*args, **{**options, **wrong})


def _half_of(name: str) -> Make:
    return lambda whole: lambda *args, **options: whole(*args, **{**options, name: options[name] / 2})


def _steps_from_zero(whole: Function) -> Function:
    """Without the correction of the moments' bias: as if an update had many before it."""

    def update(params: Any, grads: Any, first: Any, second: Any, largest: Any, steps: Any, **options: Any) -> None:
        whole(params, grads, first, second, largest, [step + 1000 for step in steps], **options)

    return update


def _mean_half_as_fast(whole: Function) -> Function:
    def update(self: Any, found_inf: Tensor) -> None:
        kept, self._decay = self._decay, 1.0 - (1.0 - self._decay) / 2
        whole(self, found_inf)
        self._decay = kept

    return update


def _step_of(change: int) -> Make:
    """Of the engine's updates alone: one process has a rate of its own."""
    return lambda whole: lambda spec: SimpleNamespace(at=lambda step: whole(spec).at(max(0, step + change)))


def _sums_of_one_rank(whole: Function) -> Function:
    """The sums of the loss are those of this rank's microbatches."""

    def end(self: GlobalSums) -> None:
        self.is_counting = False

    return end


def _sums_without_dropout(whole: Function) -> Function:
    """The forwards that count draw no masks, those of the step do."""
    return lambda self, step, *, training=False: whole(self, step, training=False)


def _gradient_of_one_microbatch(move: Function) -> Function:
    """The gradient of a share is that of its own microbatch's part."""
    return lambda gradient: gradient


FAULTS = {
    "sums of the loss: of one rank": Fault(GlobalSums, "end", _sums_of_one_rank, seed=3),
    "sums of the loss: without dropout": Fault(executor.Executor, "evaluate", _sums_without_dropout, seed=32),
    "sums of the loss: gradient of one microbatch": Fault(
        counts, "Way", changes.way_of("global_sum", back=_gradient_of_one_microbatch), seed=3
    ),
    "loss: 1/n of a mean over microbatches halved": Fault(
        _Rewriter, "_average", lambda whole: _num_microbatches_halved(whole), seed=179
    ),
    "loss: denominators halved": Fault(batch_prep, "denominators", _denominators_times(0.5), seed=25),
    "loss: denominators without dp": Fault(batch_prep, "denominators", _without_dp, seed=179),
    "loss: denominators without microbatches": Fault(batch_prep, "denominators", _of_one_microbatch, seed=25),
    "loss: denominators of one rank": Fault(batch_prep, "denominators", _of_one_rank, seed=3),
    "mean over a cut dim: 1/n halved": Fault(writer, "REWRITES", _half_mean, seed=62),
    "loss scale: halved in the loss": Fault(executor, "_seed", _half_seed, seed=177),
    "loss scale: halved where gradients are read": Fault(LossScale, "value", _half_value, seed=177),
    "loss scale: halved in the update": Fault(DistributedOptimizer, "_divisor", _half_divisor, seed=147),
    "clip: left out": Fault(DistributedOptimizer, "_divisor", _without_clip, seed=177),
    "clip: of the scaled norm": Fault(DistributedOptimizer, "_divisor", _clip_of_scaled_norm, seed=177),
    "adamw: weight decay left out": Fault(flat, "KERNELS", _adamw(_given(weight_decay=0.0)), seed=0),
    "adamw: learning rate halved": Fault(flat, "KERNELS", _adamw(_half_of("lr")), seed=0),
    "adamw: first beta halved": Fault(flat, "KERNELS", _adamw(_half_of("beta1")), seed=0),
    "adamw: second beta halved": Fault(flat, "KERNELS", _adamw(_half_of("beta2")), seed=0),
    "adamw: bias correction left out": Fault(flat, "KERNELS", _adamw(_steps_from_zero), seed=0),
    "learning rate: of the next step": Fault(update, "LearningRate", _step_of(1), seed=62),
    "learning rate: of the step before": Fault(update, "LearningRate", _step_of(-1), seed=62),
    "mean of the weights: share halved": Fault(WeightAverage, "update", _mean_half_as_fast, seed=177),
    "mean of the weights: not updated": Fault(
        WeightAverage, "update", lambda whole: lambda self, found_inf: None, seed=177
    ),
}
