"""Contiguous parameter and gradient buffers, filled by the backward and reduced bucket by bucket while it runs.

    hook of parameter p       main_grad(p) = grad(p)         first microbatch of the step (no zeroing pass)
                              main_grad(p) += grad(p)        the others
    product with parameter p  main_grad(p) = gᵀ x, or += gᵀ x: in place, without a temporary gradient
    last gradient of the last microbatch of a bucket   ->   reduce-scatter of that bucket starts (asynchronous)

``parameter.data`` becomes a view of the parameter buffer, so that an all-gather in place delivers the new weights.
Buckets start in one order, fixed at construction, because every data-parallel rank must issue the same collectives in
the same order whichever of its parameters got a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.interceptors import installed
from passes.ops.weight_gradients import add_whole
from passes.parameters import LocalParameter
from planner.sharding.buckets import Bucket, Range
from planner.sharding.buffers import Buffer
from planner.sharding.residency import Residency
from runtime.optimizer.slots import (
    BucketTensors,
    DataParallel,
    ParameterPlace,
    ParameterSlot,
    all_gather,
    reduce_scatter,
    without_memory,
)
from runtime.optimizer.unmixed import Unmixed
from runtime.optimizer.whole_weights import ScatteredGradients, WholeWeights


class BufferTensors:
    """The parameters and gradients of one planned buffer, in two contiguous tensors of the same layout."""

    def __init__(self, planned: Buffer, shared_by: DataParallel, device: torch.device) -> None:
        self.planned, self.layout = planned, planned.layout
        parameters = _Memory(planned.dtype, device, self.layout.num_elements, is_kept=not planned.gathers)
        num_gradients = 0 if planned.is_frozen else self.layout.num_elements
        gradients = _Memory(planned.gradient_dtype, device, num_gradients, is_kept=not planned.scatters)
        self.kept_parameters, self.kept_gradients = parameters.kept, gradients.kept
        self.slots: dict[str, ParameterSlot] = {}
        self._places = {slot.name: slot for slot in self.layout.slots}
        self.buckets = [self._bucket(bucket, shared_by, parameters, gradients) for bucket in self.layout.buckets]

    def _bucket(
        self, layout: Bucket, shared_by: DataParallel, parameters: _Memory, gradients: _Memory
    ) -> BucketTensors:
        own = layout.shard(shared_by.shard_rank, self.layout.num_ranks)
        (held, own_held), (summed, own_summed) = parameters.of(layout.world, own), gradients.of(layout.world, own)
        return BucketTensors(self.planned, shared_by, layout, held, summed, own_held, own_summed)

    def bucket_of(self, fqn: str) -> BucketTensors:
        return self.buckets[self._places[fqn].bucket]

    def adopt(self, entry: _Entry) -> None:
        """Move a parameter into this buffer; a tied parameter's later copies share the slot of the first."""
        fqn, shape = entry.local.fqn, entry.parameter.shape
        place, bucket = self._places[fqn], self.bucket_of(fqn)
        within = place.world.shifted(-bucket.layout.world.start)
        view = bucket.parameters[within.start : within.stop].view(shape)
        slot = self.slots.get(fqn)
        if slot is None:
            summed = bucket.gradients[within.start : within.stop]
            main_grad = summed if self.planned.is_frozen else summed.view(shape)
            slot = ParameterSlot(entry.local, [], entry.position, place.world, main_grad, self.buckets[place.bucket])
            self.slots[fqn] = slot
            slot.bucket.slots.append(slot)
            if not entry.parameter.is_meta:
                view.copy_(entry.parameter.detach())
        slot.position = max(slot.position, entry.position)
        slot.parameters.append(_rebase(entry.parameter, view))
        entry.parameter.main_grad = slot.main_grad  # type: ignore[attr-defined]


class _Memory:
    """The memory of one kind of values of a buffer. ``is_kept``: one tensor for all; otherwise each bucket has memory
    for this rank's shard, and full tensors without memory. ``kept``: the tensors with memory.

    Initialised with zeros: padding must not add to norms, nor drift under weight decay.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_elements: int, *, is_kept: bool) -> None:
        self._dtype, self._device = dtype, device
        self._whole = torch.zeros(num_elements, dtype=dtype, device=device) if is_kept else None
        self.kept = [self._whole] if self._whole is not None else []

    def of(self, world: Range, own: Range) -> tuple[Tensor, Tensor]:
        """Return the full tensor of one bucket and this rank's part."""
        if self._whole is not None:
            return self._whole[world.start : world.stop], self._whole[own.start : own.stop]
        self.kept.append(torch.zeros(len(own), dtype=self._dtype, device=self._device))
        return without_memory(len(world), self._dtype, self._device), self.kept[-1]


@dataclass(frozen=True, slots=True)
class _Entry:
    local: LocalParameter
    parameter: nn.Parameter
    position: int


class GradientBuffers:
    """All buffers of one rank, their gradient hooks, and the reductions and gathers over the ranks that share them.

    ``shared_by``: those of each axis that a buffer is reduced over: dp or dp-cp, and edp for experts with axes of their
    own. Their buckets start in one order, which has the same sequence of buckets over dp or dp-cp on all ranks of a
    stage, and of those over edp on all ranks that share them.

    The caller sets ``last_microbatch`` before each backward: True if it is the last one of its stage in this step.
    ``launches`` records (buffer, bucket) of the reductions of the current step, in the order of their start.
    ``unmixed``: finds NaN and infinity in this rank's part of each bucket, before ranks mix them.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[LocalParameter, nn.Parameter]],
        planned: Iterable[Buffer],
        shared_by: Mapping[str, DataParallel],
        *,
        device: torch.device | str = "cpu",
        chunk_of: Mapping[int, int] | None = None,
        residency: Residency | None = None,
    ) -> None:
        """``chunk_of``: by id of a parameter; else 0. ``residency``: when full sharded weights are freed; None: after
        each use.
        """
        self.last_microbatch = False
        self.unmixed = Unmixed()
        self.launches: list[tuple[int, int]] = []
        self.buffers = [BufferTensors(b, shared_by[b.reduced_over], torch.device(device)) for b in planned]
        self._adopt(_entries(parameters, {name for b in self.buffers for name in b.planned.by_name}))
        indexed = [(b, i, bucket) for b, buffer in enumerate(self.buffers) for i, bucket in enumerate(buffer.buckets)]
        scattered = (bucket for *_, bucket in indexed if bucket.planned.scatters)
        self.scattered = ScatteredGradients(scattered, chunk_of or {}, self.unmixed)
        gathered = {(b, i): bucket for b, i, bucket in indexed if bucket.planned.gathers}
        self.weights = WholeWeights(gathered, residency or Residency(reshards=True))
        self._in_order = sorted(indexed, key=lambda entry: entry[2].position)
        self._order = [e for e in self._in_order if not (e[2].planned.scatters or e[2].planned.is_frozen)]
        self._next = 0
        self._is_deaf = False
        self._gathers: dict[tuple[int, int], Any] = {}
        self._slot_of = {id(parameter): slot for slot in self.slots for parameter in slot.parameters}
        self._places = {
            id(parameter): ParameterPlace(slot, parameter, self.arrived)
            for slot in self.slots
            for parameter in slot.parameters
        }
        self._in_graphs: list[ParameterSlot] = []
        self._watched: list[nn.Parameter] = []
        for slot in (slot for b in self.buffers if not b.planned.is_frozen for slot in b.slots.values()):
            for parameter in slot.parameters:
                self._listen(parameter, slot)
        self.begin_step()

    def _adopt(self, entries: Iterable[_Entry]) -> None:
        """Move parameters into their buckets, one bucket after the other: views are made while it has memory."""
        of_buckets: dict[int, tuple[BufferTensors, list[_Entry]]] = {}
        for entry in entries:
            (buffer,) = (b for b in self.buffers if entry.local.fqn in b.planned.by_name)
            of_buckets.setdefault(id(buffer.bucket_of(entry.local.fqn)), (buffer, []))[1].append(entry)
        for buffer, own in of_buckets.values():
            with buffer.bucket_of(own[0].local.fqn).opened():
                for entry in own:
                    buffer.adopt(entry)

    @property
    def slots(self) -> list[ParameterSlot]:
        return [slot for buffer in self.buffers for slot in buffer.slots.values()]

    def deaf(self) -> AbstractContextManager[None]:
        """Gradients that come meanwhile are of no step, as those of a capture: they stay in ``.grad``."""
        return installed((self, "_is_deaf", True))

    def begin_step(self) -> None:
        """Forget every gradient: the next one of each parameter is copied instead of added; a graph only adds."""
        self.launches = []
        self.unmixed.begin_step()
        self.scattered.begin_step()
        self._rearm()
        for slot in self._in_graphs:
            slot.main_grad.zero_()
            slot.is_fresh = False

    def add_in_graphs(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let graphs add the gradients of these from the next step on; ``arrived`` is called for each."""
        slots = {self._slot_of[id(p)].local.fqn: self._slot_of[id(p)] for p in parameters}
        self._in_graphs = list(slots.values())

    def finish_grad_sync(self) -> None:
        """Reduce the buckets that have not started, with zeros for parameters without a gradient, and wait for all.

        Then ``own_gradients`` of each bucket are the sums over the ranks that share it, and the next step may begin.
        """
        self.scattered.finish()
        for slot in self.slots:
            if slot.is_fresh and not slot.bucket.planned.scatters:
                slot.main_grad.zero_()
        while self._next < len(self._order):
            self._launch()
        for *_, bucket in self._order:
            if bucket.work is not None:
                bucket.work.wait()
        self._rearm()

    def start_parameter_gather(self) -> None:
        """Send every rank the others' new parameters, in place; ``wait_bucket`` and ``wait_parameters`` end it."""
        self.wait_parameters()  # gathers of the previous update that no forward has awaited
        for *place, bucket in reversed(self._in_order):  # the forward reads them in the reverse of the backward's order
            dp = bucket.shared_by
            if dp.num_shards > 1 and not bucket.planned.gathers:
                work = all_gather(bucket.parameters, bucket.own_parameters, group=dp.group, async_op=True)
                self._gathers[place[0], place[1]] = work

    def wait_bucket(self, buffer: int, bucket: int) -> None:
        """Wait for the parameters of one bucket."""
        work = self._gathers.pop((buffer, bucket), None)
        if work is not None:
            work.wait()

    def wait_parameters(self) -> None:
        """Wait for all parameters of the last update, except sharded ones: call it before they are read."""
        for place in list(self._gathers):
            self.wait_bucket(*place)

    def _rearm(self) -> None:
        for slot in self.slots:
            slot.is_fresh = True  # full gradients that were scattered have no memory
        for *_, bucket in self._order:
            bucket.missing = bucket.awaited(id(p) for slot in bucket.slots for p in slot.parameters)
            bucket.work, bucket.is_reducing = None, False
        self._next = 0
        self.last_microbatch = False

    def _listen(self, leaf: nn.Parameter, slot: ParameterSlot) -> None:
        """Hear of every gradient of ``leaf``. The hook holds no buffer: C++ holds it, where no collector looks."""
        leaf.register_post_accumulate_grad_hook(partial(_gradient_came, ref(self), ref(slot)))

    def _on_gradient(self, slot: ParameterSlot, parameter: Tensor) -> None:
        if self._is_deaf or parameter.grad is None:  # autograd calls for a leaf to which nothing came, too
            return
        add_whole(slot.main_grad, parameter.grad, is_fresh=slot.take())
        parameter.grad = None
        self.arrived(parameter)

    def watch(self, alias: nn.Parameter, parameter: nn.Parameter) -> None:
        """Gradients of ``alias``, another leaf over a parameter's memory, are the parameter's."""
        self._listen(alias, self._slot_of[id(parameter)])
        self._places[id(alias)] = self._places[id(parameter)]
        self._watched.append(alias)  # keeps its id unique

    def place_of(self, parameter: Tensor) -> ParameterPlace | None:
        """Return the memory to which products add gradients of ``parameter``; None if autograd accumulates them."""
        return None if self._is_deaf else self._places.get(id(parameter))

    def expect(self, contributions: Mapping[int, int]) -> None:
        """Set how often a backward gives a gradient, by the parameter's id, for those that several products read."""
        for key, times in contributions.items():
            if key in self._slot_of:
                self._slot_of[key].bucket.contributions[key] = times
        self.begin_step()

    def arrived(self, parameter: Tensor) -> None:
        """Note that a contribution to a parameter's gradient of this microbatch is in its buffer."""
        if not self.scattered and not self.last_microbatch:
            return
        bucket = self._slot_of[id(parameter)].bucket
        if bucket.planned.scatters:
            self.scattered.arrived(bucket, parameter)
        elif self.last_microbatch:
            bucket.arrived(parameter)
            while self._next < len(self._order) and not self._order[self._next][2].missing:
                self._launch()

    def _launch(self) -> None:
        if self._next == 0:
            self.launches = []
        buffer, index, bucket = self._order[self._next]
        self._next += 1
        self.launches.append((buffer, index))
        bucket.is_reducing = True
        self.unmixed.see_gradients(bucket.slots)
        dp = bucket.shared_by
        if dp.size == 1:
            return
        if dp.sharded:
            bucket.work = reduce_scatter(bucket.own_gradients, bucket.gradients, group=dp.group, async_op=True)
        else:
            bucket.work = dist.all_reduce(bucket.gradients, group=dp.group, async_op=True)


def _entries(parameters: Iterable[tuple[LocalParameter, nn.Parameter]], names: Collection[str]) -> list[_Entry]:
    """Return the parameters of these names, each module parameter once, with positions in the (reversed) backward."""
    laid_out = [(local, p) for local, p in parameters if local.fqn in names]
    entries: dict[int, _Entry] = {}
    for place, (local, parameter) in enumerate(laid_out):
        entries.setdefault(id(parameter), _Entry(local, parameter, len(laid_out) - 1 - place))
    return list(entries.values())


def _rebase(parameter: nn.Parameter, view: Tensor) -> nn.Parameter:
    """Make ``view`` the parameter's storage; the object itself stays, as modules and graphs refer to it."""
    if parameter.device == view.device:
        parameter.data = view
    else:  # .data: writes to the buffer are no changes that autograd has to know of
        torch.utils.swap_tensors(parameter, nn.Parameter(view.data, requires_grad=parameter.requires_grad))
    return parameter


def _gradient_came(buffers: ref[GradientBuffers], slot: ref[ParameterSlot], parameter: Tensor) -> None:
    """Handle a gradient: the hook of a parameter, which may outlive the buffers."""
    owner, place = buffers(), slot()
    if owner is not None and place is not None:
        owner._on_gradient(place, parameter)
