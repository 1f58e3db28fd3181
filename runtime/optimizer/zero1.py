"""ZeRO-1: every data-parallel rank updates its share of each bucket, and the ranks exchange gradients and parameters.

    reduce      shard of g = sum over dp (reduce-scatter), to float32, then summed over the axes it is partial over;
                over dp-cp instead of dp with cp > 1, over edp for experts with ep or etp
    norm        |g|² over all ranks, each logical element once; g <- g · min(1, clip/(|g| + 1e-6))
    step        the update rule on the float32 (or float64) main shard; shard -> parameter buffer; all-gather

Nothing is divided by the number of ranks: losses are already shares of the global batch's mean, so gradients add up.
Norm, clip and whether the update is skipped stay on the device, and the rule reads them there: the host never waits.
Bytes a parameter for d ranks: float32 8 + 8/d; bfloat16 with float32 gradients 6 + 12/d, with bfloat16 ones 4 + 16/d.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.parameters import LocalParameter
from planner.mesh import OF_WEIGHTS, REPLICA
from planner.sharding.buffers import Buffer
from planner.sharding.residency import Residency
from planner.spec.update_rules import MEAN_RULES
from planner.updates import Settings, base_of
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.flat import FlatOptimizer, FlatShard, SettingsRun, ShardPart
from runtime.optimizer.main_shards import (
    MainShard,
    ScheduleFreeMean,
    WeightAverage,
    in_common_order,
    merged_runs,
    size_and_rank,
    squared_norm,
    tied_order,
    whole_indices,
)
from runtime.optimizer.matrices import BucketExchange
from runtime.optimizer.slots import BucketTensors, DataParallel, all_gather


@dataclass(frozen=True, slots=True)
class StepResult:
    """One update, on the device. ``figures`` (float64): the global gradient norm before clipping; 1 if the update was
    skipped, else 0; then the extra scalars, summed over all ranks. ``found_inf``: the second figure in float32.
    """

    figures: Tensor
    found_inf: Tensor


class DistributedOptimizer:
    """The ZeRO optimizer. Owns the buffers, the main shards, the optimizer that updates them, and their running mean.

    A step: backwards (with ``buffers.last_microbatch`` set before the last) -> ``reduce_gradients()`` ->
    ``step(lr)`` -> ``wait_parameters()`` before the parameters are read again.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[LocalParameter, nn.Parameter]],
        planned: Sequence[Buffer],
        settings: Any,
        *,
        groups: Mapping[Any, Any] | None = None,
        device: torch.device | str = "cpu",
        asked: Mapping[str, tuple[int, ...]] | None = None,
        own: Mapping[str, Settings] | None = None,
        exchanges: Mapping[tuple[int, int], BucketExchange] | None = None,
        chunk_of: Mapping[int, int] | None = None,
        residency: Residency | None = None,
    ) -> None:
        """``planned``: this rank's buffers in the plan. ``settings``: the spec's optimizer section. ``asked``: name →
        the conditions under which a parameter rests (ShardPart). ``own``: name → settings that differ from the
        section's. ``exchanges``: by (buffer, bucket), for buckets that are updated matrix by matrix.

        ``groups``: process groups by axis, None or absent for an axis of one rank: all that buffers are reduced over
        (Buffer.reduced_over), "world", all that a parameter is sharded or partial over; and by stages of tied ones.
        """
        self.settings = settings
        self.groups = dict(groups or {})
        shared_by = {axis: self._shared_over(axis) for axis in dict.fromkeys(b.reduced_over for b in planned)}
        options: dict[str, Any] = {"device": device, "chunk_of": chunk_of, "residency": residency}
        self.buffers = GradientBuffers(parameters, planned, shared_by, **options)
        self.device = torch.device(device)
        self.shards, flat = list[MainShard](), list[FlatShard]()
        for i, buffer in enumerate(self.buffers.buffers):
            for place, bucket in enumerate(() if buffer.planned.is_frozen else buffer.buckets):
                shard = self._shard(bucket)
                self.shards.append(shard)
                flat.append(self._flat(shard, asked or {}, own or {}, (exchanges or {}).get((i, place))))
        self.optimizer = FlatOptimizer(flat, base_of(settings)) if flat else None
        self.average: WeightAverage | ScheduleFreeMean | None = None  # of the weights, evaluated in their place
        if MEAN_RULES & settings.rules:
            self.average = ScheduleFreeMean(self.optimizer)
        elif settings.ema is not None:
            self.average = WeightAverage([shard.main for shard in self.shards], settings.ema)
        self.before_overwriting: Callable[[], None] = lambda: None  # parameters and state, as a save reads them
        self._is_reduced = False

    # ---- one step

    def turn_to(self, *, of_own_loss: bool) -> None:
        """Set whether the gradients of the next update are those of the model's own loss."""
        if self.optimizer is not None:
            self.optimizer.of_own_loss = of_own_loss

    def begin_step(self) -> None:
        """Forget the gradients of an earlier or aborted step."""
        self.buffers.begin_step()
        self._is_reduced = False

    def reduce_gradients(self) -> None:
        """Finish the sums over dp, then over the axes that parameters are partial over. All ranks must call it."""
        self.buffers.finish_grad_sync()
        for shard in self.shards:
            if shard.grad.dtype != shard.bucket.gradients.dtype:
                shard.grad.copy_(shard.bucket.own_gradients)
        for axis in in_common_order(shard.bucket.planned.partial_over for shard in self.shards):
            for shard in sorted(self.shards, key=tied_order):
                if axis in shard.bucket.planned.partial_over:
                    self._sum_over(axis, shard)
        self._is_reduced = True

    def step(
        self,
        lr: float,
        *,
        grad_scale: Tensor | float = 1.0,
        extra: Sequence[Tensor | float] = (),
        refused: Callable[[Tensor], Tensor] | None = None,
        asked: Callable[[Tensor], Tensor] | None = None,
    ) -> StepResult:
        """Clip, update and start the gather of the parameters. ``grad_scale``: the factor of the loss.

        ``extra`` scalars and vectors are summed over all ranks in the same all-reduce as the norm. An update is skipped
        on every rank if the norm or an extra sum is not finite, or if ``refused``, a function of the extra sums,
        returns True on the device. ``asked`` maps the extra sums to the figures by which parameters rest.
        """
        if not self._is_reduced:
            self.reduce_gradients()
        sums = self._sum_over_world([self._squared_norm(), *extra])
        norm = sums[:1].sqrt() / grad_scale
        is_finite = torch.isfinite(norm).all() & torch.isfinite(sums[1:]).all()
        skipped = is_finite.logical_not().view(1)
        if refused is not None:
            skipped = skipped | refused(sums[1:])
        found_inf = skipped.squeeze().to(torch.float32)
        self._is_reduced = False
        figures = None if asked is None else asked(sums[1:])
        self.wait_parameters()  # gathers of the previous update that no forward has awaited
        self.buffers.weights.drop()
        self.buffers.unmixed.see_parameters(shard.bucket for shard in self.shards)
        self.before_overwriting()
        self._update(lr, self._divisor(norm.squeeze(), grad_scale), found_inf, figures)
        self.buffers.start_parameter_gather()
        return StepResult(torch.cat([norm, skipped.to(norm.dtype), sums[1:]]), found_inf)

    def wait_parameters(self) -> None:
        """Wait for the updated parameters of all ranks."""
        self.buffers.wait_parameters()

    def sync_main_from_parameters(self) -> None:
        """Copy the main shards from the parameters again, after weights were loaded into them."""
        self.buffers.unmixed.forget()
        for shard in self.shards:
            if shard.owns_main:
                shard.main.copy_(shard.bucket.own_parameters)
        if self.average is not None:
            self.average.start()

    def exchange_average(self) -> None:
        """Exchange the weights and their mean on all ranks; a second call restores the weights bitwise."""
        assert self.average is not None, "optimizer.ema is null"
        self.wait_parameters()
        self.buffers.weights.drop()
        self.before_overwriting()
        self.average.exchange()
        for shard in self.shards:
            if shard.owns_main:
                shard.bucket.own_parameters.copy_(shard.main)
        self.buffers.start_parameter_gather()
        self.wait_parameters()

    def own_gradients(self) -> dict[str, Tensor]:
        """Return the elements of summed gradients that this rank owns, by dotted name; after ``reduce_gradients()``."""
        assert self._is_reduced, "own_gradients comes after reduce_gradients and before step"
        owned = [(fqn, shard.grad, o.local) for shard in self.shards for fqn, o in shard.bucket.owned.items()]
        return {fqn: grad[within.start : within.stop] for fqn, grad, within in owned}

    def gather_gradients(self, *, grad_scale: float = 1.0) -> dict[str, Tensor]:
        """Return the summed gradients of this rank's parts by dotted name, the same on all ranks that share a part.

        Call it on all ranks between ``reduce_gradients()`` and ``step()``: gradients are not yet clipped.
        """
        assert self._is_reduced, "gather_gradients comes after reduce_gradients and before step"
        gradients = {}
        for shard in self.shards:
            full = self._gathered(shard) / grad_scale
            for slot in shard.bucket.slots:
                place = slot.world.shifted(-shard.bucket.layout.world.start)
                gradients[slot.local.fqn] = full[place.start : place.stop].view(slot.main_grad.shape)
        return gradients

    def measured_bytes(self) -> dict[str, int]:
        """Return the bytes of the live tensors by kind; a view of another kind's tensor counts there."""
        state = self.optimizer.state if self.optimizer is not None else {}
        moments = [moment for moments in state.values() for moment in moments.values()]
        kinds: dict[str, Iterable[Tensor]] = {
            "parameters": [tensor for buffer in self.buffers.buffers for tensor in buffer.kept_parameters],
            "gradients": [tensor for buffer in self.buffers.buffers for tensor in buffer.kept_gradients],
            "main_parameters": [shard.main for shard in self.shards],
            "main_gradients": [shard.grad for shard in self.shards],
            "optimizer": [*moments, *(self.average.held if self.average is not None else ())],
        }
        seen: set[int] = set()
        return {kind: _new_bytes(tensors, seen) for kind, tensors in kinds.items()}

    @property
    def copy_of_shards(self) -> tuple[int, int]:
        """Among groups with equal shards of dense parameters: the index of this rank's group, and their number."""
        size, rank = size_and_rank(self.groups.get(REPLICA))
        return rank, size

    # ---- pieces

    def _shared_over(self, axis: str) -> DataParallel:
        group = self.groups.get(axis)
        weights = self.groups.get(axis + OF_WEIGHTS) or group
        return DataParallel(group, *size_and_rank(group), sharded=self.settings.zero >= 1, of_weights=weights)

    def _shard(self, bucket: BucketTensors) -> MainShard:
        planned, dtype = bucket.planned, bucket.planned.main_dtype
        main = bucket.own_parameters.to(dtype)  # the view itself if the dtype is equal
        grad = bucket.own_gradients if bucket.gradients.dtype == dtype else torch.zeros_like(main)
        main.grad = grad
        axis, owned = planned.axis, bucket.owned
        locals_ = {slot.local.fqn: slot.local for slot in bucket.slots}
        counted = merged_runs((r.local.start, r.local.stop, locals_[fqn].counted) for fqn, r in owned.items())
        whole = None
        if planned.has_whole_segment:
            whole = whole_indices(owned, locals_, size_and_rank(self.groups.get(axis))[0]).to(main.device)
        return MainShard(bucket, main, grad, counted, whole)

    def _flat(
        self,
        shard: MainShard,
        asked: Mapping[str, tuple[int, ...]],
        own: Mapping[str, Settings],
        exchange: BucketExchange | None,
    ) -> FlatShard:
        """Return the shard with its parts that may rest, and its elements with their own settings."""
        planned, owned = shard.bucket.planned, [(fqn, r.local) for fqn, r in shard.bucket.owned.items()]
        parts = tuple(ShardPart(fqn, r.start, r.stop, asked[fqn]) for fqn, r in owned if fqn in asked)
        runs = [SettingsRun(r.start, r.stop, own[fqn]) for fqn, r in owned if fqn in own]
        in_order = tuple(sorted(runs, key=lambda run: run.start))
        return FlatShard(shard.main, planned.rule, planned.moments, parts, in_order, exchange)

    def _sum_over(self, axis: str, shard: MainShard) -> None:
        group = self.groups.get(shard.bucket.planned.tied_stages if axis == "embedding" else axis)
        if group is None:
            return
        if axis == shard.bucket.planned.axis and shard.whole is not None:
            values = shard.grad[shard.whole]
            dist.all_reduce(values, group=group)
            shard.grad[shard.whole] = values
        else:
            dist.all_reduce(shard.grad, group=group)

    def _squared_norm(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self.shards:
            grad, dp = shard.grad, shard.bucket.shared_by
            if not dp.sharded and dp.rank != 0:
                continue  # each rank has the full gradient
            if REPLICA in shard.bucket.planned.partial_over and self.copy_of_shards[0] != 0:
                continue
            if shard.whole is not None and size_and_rank(self.groups.get(shard.bucket.planned.axis))[1] != 0:
                grad = grad.index_fill(0, shard.whole, 0.0)
            for start, stop in shard.counted:
                total += squared_norm(grad[start:stop])
        return total

    def _sum_over_world(self, scalars: Sequence[Tensor | float]) -> Tensor:
        values = torch.cat([torch.as_tensor(s, dtype=torch.float64, device=self.device).view(-1) for s in scalars])
        if self.groups.get("world") is not None:
            dist.all_reduce(values, group=self.groups["world"])
        return values

    def _divisor(self, norm: Tensor, grad_scale: Tensor | float) -> Tensor | None:
        """Return the divisor of gradients; None if nothing is clipped or scaled."""
        limit = self.settings.clip_grad_norm
        if limit is None:
            is_one = not isinstance(grad_scale, Tensor) and grad_scale == 1.0
            return None if is_one else torch.as_tensor(grad_scale, dtype=norm.dtype, device=norm.device)
        return ((norm + 1e-6) / limit).clamp(min=1.0) * grad_scale

    def _update(self, lr: float, divisor: Tensor | None, found_inf: Tensor, asked: Tensor | None) -> None:
        """Update; the rule divides gradients by ``divisor`` in float32, float64 gradients are divided before it."""
        if self.optimizer is None:
            return
        if divisor is not None and any(shard.grad.dtype == torch.float64 for shard in self.shards):
            divisor = torch.where(found_inf.bool(), 1.0, divisor)  # a skipped step must keep the zeros of padding
            for shard in self.shards:
                shard.grad.div_(divisor)
            divisor = None
        self.optimizer.step(lr, None if divisor is None else divisor.to(torch.float32), found_inf, asked)
        for shard in self.shards:
            if shard.owns_main:
                shard.bucket.own_parameters.copy_(shard.main)
        if self.average is not None:
            self.average.update(found_inf)

    def _gathered(self, shard: MainShard) -> Tensor:
        dp = shard.bucket.shared_by
        if dp.num_shards == 1:
            return shard.grad
        full = torch.empty(len(shard.bucket.layout.world), dtype=shard.grad.dtype, device=shard.grad.device)
        all_gather(full, shard.grad.contiguous(), group=dp.group)
        return full


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
