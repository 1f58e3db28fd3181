"""Faults of what ranks share at the end of a step: sums of gradients, updated parameters, norm, loss, tied weights."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from runtime.engine.build import Running
from runtime.optimizer import buffers, whole_weights, zero1
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.whole_weights import ScatteredGradients, WholeWeights
from runtime.optimizer.zero1 import DistributedOptimizer
from tests.tools.planted import changes
from tests.tools.planted.fault import Fault, Function, Make, groups_here, other_group


def _of_all_reduce(change: Make) -> Make:
    """Of the module ``dist`` as the buffers use it: one function."""
    return lambda dist: SimpleNamespace(all_reduce=change(dist.all_reduce))


def _over(axis: str, change: Make) -> Make:
    """Only where the collective runs over ``axis``."""

    def make(whole: Function) -> Function:
        wrong = change(whole)

        def call(*args: Any, group: Any, async_op: bool = False) -> Any:
            is_this = group is not None and group is groups_here().over(axis)
            return (wrong if is_this else whole)(*args, group=group, async_op=async_op)

        return call

    return make


def _sum_of(axis: str, wrong: Callable[..., None]) -> Make:
    """The sum of partial gradients over ``axis``; ``wrong(whole, optimizer, axis, shard)``."""

    def make(whole: Function) -> Function:
        def sum_over(self: Any, given: str, shard: Any) -> None:
            wrong(whole, self, given, shard) if given == axis else whole(self, given, shard)

        return sum_over

    return make


def _left_out(whole: Function, optimizer: Any, axis: str, shard: Any) -> None:
    """No sum."""


def _twice(whole: Function, optimizer: Any, axis: str, shard: Any) -> None:
    whole(optimizer, axis, shard)
    whole(optimizer, axis, shard)


def _on_wrong_axis(whole: Function, optimizer: Any, axis: str, shard: Any) -> None:
    right = optimizer.groups[axis]
    if right is not None:
        optimizer.groups[axis] = other_group(right)
        whole(optimizer, axis, shard)
        optimizer.groups[axis] = right


def _norm_of_one_rank(whole: Function) -> Function:
    def sums(self: Any, scalars: Any) -> Tensor:
        return torch.cat([torch.as_tensor(scalars[0]).view(1), whole(self, scalars)[1:]])

    return sums


def _norm_summed_twice(whole: Function) -> Function:
    return lambda self, scalars: whole(self, [whole(self, scalars)[0], *scalars[1:]])


def _norm_over(axis: str) -> Make:
    def make(whole: Function) -> Function:
        def sums(self: Any, scalars: Any) -> Tensor:
            right, self.groups["world"] = self.groups["world"], groups_here().over(axis)
            norm = whole(self, scalars)[:1]
            self.groups["world"] = right
            return torch.cat([norm, whole(self, scalars)[1:]])

        return sums

    return make


def _every_copy_counted(whole: Function) -> Function:
    return lambda runs: whole((start, stop, True) for start, stop, _ in runs)


def _all_gradients_of_first(whole: Function) -> Function:
    """Of contributions to one parameter in one microbatch the last alone stays, as where a tied gradient is lost."""

    def on_gradient(self: Any, slot: Any, parameter: Tensor) -> None:
        if parameter.grad is not None and slot.bucket.contributions.get(id(parameter), 1) > 1:
            parameter.grad = None
            self.arrived(parameter)
            return
        whole(self, slot, parameter)

    return on_gradient


def _one_loss(whole: Function) -> Function:
    """The loss of this rank."""
    return lambda self, addend: addend.item()


def _shards_in_reverse(whole: Function) -> Function:
    """After the gather of parameters each rank's shard stands in the place of another's."""

    def gather(given: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> Any:
        kept = own.clone()
        whole(given, own, group=group)
        parts = given.view(group.size(), -1)
        parts.copy_(parts.flip(0))
        own.copy_(kept)
        return changes.Done()

    return gather


def _last_microbatch_alone(whole: Function) -> Function:
    """Each backward's sums take the place of those before."""

    def settle(self: Any, **options: Any) -> None:
        self._filled = set()
        whole(self, **options)

    return settle


def _stale(whole: Function) -> Function:
    """Weights that are whole stay so after an update."""
    return lambda self: None


FAULTS = {
    "sharded gradients: reduce-scatter left out": Fault(whole_weights, "reduce_scatter", changes.call_left_out, seed=3),
    "sharded gradients: reduce-scatter doubled": Fault(whole_weights, "reduce_scatter", changes.call_twice, seed=3),
    "sharded gradients: of the last microbatch alone": Fault(
        ScatteredGradients, "_settle", _last_microbatch_alone, seed=3
    ),
    "sharded weights: all-gather in the wrong order": Fault(whole_weights, "all_gather", _shards_in_reverse, seed=21),
    "sharded weights: those before the update": Fault(WholeWeights, "drop", _stale, seed=21),
    "gradients: reduce-scatter over dp left out": Fault(
        buffers, "reduce_scatter", _over("dp", changes.call_left_out), seed=186
    ),
    "gradients: reduce-scatter over dp doubled": Fault(
        buffers, "reduce_scatter", _over("dp", changes.call_twice), seed=186
    ),
    "gradients: reduce-scatter on the wrong axis": Fault(
        buffers, "reduce_scatter", _over("dp", changes.call_on_wrong_axis), seed=186
    ),
    "gradients: all-reduce over dp left out": Fault(
        buffers, "dist", _of_all_reduce(_over("dp", changes.call_left_out)), seed=43
    ),
    "gradients: all-reduce over dp doubled": Fault(
        buffers, "dist", _of_all_reduce(_over("dp", changes.call_twice)), seed=43
    ),
    "gradients: all-reduce on the wrong axis": Fault(
        buffers, "dist", _of_all_reduce(_over("dp", changes.call_on_wrong_axis)), seed=628
    ),
    "gradients: sum over dp and cp left out": Fault(
        buffers, "reduce_scatter", _over("dp-cp", changes.call_left_out), seed=0
    ),
    "gradients: sum over dp and cp doubled": Fault(
        buffers, "reduce_scatter", _over("dp-cp", changes.call_twice), seed=0
    ),
    "gradients of experts: sum over edp left out": Fault(
        buffers, "reduce_scatter", _over("edp", changes.call_left_out), seed=122
    ),
    "gradients: sum of partial ones over tp left out": Fault(
        DistributedOptimizer, "_sum_over", _sum_of("tp", _left_out), seed=86
    ),
    "gradients: sum of partial ones over tp doubled": Fault(
        DistributedOptimizer, "_sum_over", _sum_of("tp", _twice), seed=86
    ),
    "gradients: sum of partial ones on the wrong axis": Fault(
        DistributedOptimizer, "_sum_over", _sum_of("tp", _on_wrong_axis), seed=554
    ),
    "tied weight: sum over stages left out": Fault(
        DistributedOptimizer, "_sum_over", _sum_of("embedding", _left_out), seed=63
    ),
    "tied weight: sum over stages doubled": Fault(
        DistributedOptimizer, "_sum_over", _sum_of("embedding", _twice), seed=63
    ),
    "tied weight: its gradient added once": Fault(GradientBuffers, "_on_gradient", _all_gradients_of_first, seed=308),
    "parameters: all-gather left out": Fault(buffers, "all_gather", changes.call_left_out, seed=186),
    "parameters: all-gather on the wrong axis": Fault(buffers, "all_gather", changes.call_on_wrong_axis, seed=186),
    "parameters: all-gather in the wrong order": Fault(buffers, "all_gather", _shards_in_reverse, seed=186),
    "norm: sum over ranks left out": Fault(DistributedOptimizer, "_sum_over_world", _norm_of_one_rank, seed=0),
    "norm: sum over ranks doubled": Fault(DistributedOptimizer, "_sum_over_world", _norm_summed_twice, seed=0),
    "norm: sum over tp alone": Fault(DistributedOptimizer, "_sum_over_world", _norm_over("tp"), seed=63),
    "norm: every copy of a parameter counted": Fault(zero1, "merged_runs", _every_copy_counted, seed=25),
    "loss: sum over ranks left out": Fault(Running, "over_world", _one_loss, seed=179),
    "loss: every tp rank adds it": Fault(
        Running, "addend_of", lambda whole: lambda self, loss: self.nothing if loss is None else loss, seed=25
    ),
}
