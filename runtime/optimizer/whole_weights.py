"""Sharded weights (zero 3): a bucket has memory for its full weights only while they are read.

All ranks that share a bucket run the same ops in the same order, and thus gather in the same order. These all-gathers
have their own group: on one communicator, weights that a product waits for would queue behind reductions of gradients.

Sharded gradients (zero 2 and 3): every backward reduce-scatters the gradients of each bucket.

    last gradient of a microbatch of a bucket   ->   reduce-scatter starts, and runs while the next bucket fills
    own gradients = shard                            first microbatch of the step
    own gradients += shard                           the others

A backward that defers gradients of weights to a W of the schedule scatters at the end of the W: a bucket may then
contain gradients of several microbatches, which changes no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.sharding.residency import Moves, Residency, Unit
from runtime.optimizer.slots import BucketTensors, all_gather, give_memory_back, reduce_scatter, take_memory
from runtime.optimizer.unmixed import Unmixed


class WholeWeights:
    """The full weights of sharded buckets, by (buffer, bucket). Owns their memory."""

    def __init__(self, buckets: Mapping[Unit, BucketTensors], residency: Residency) -> None:
        self._buckets, self._residency = dict(buckets), residency
        self._works: dict[Unit, Any] = {}
        self._sent: dict[Unit, Tensor] = {}  # weights that are gathered in a smaller dtype
        self._is_holding = False
        self.most_bytes = 0  # peak of full weights

    def need(self, units: Sequence[Unit], ahead: Sequence[Unit] = ()) -> None:
        """Wait until the weights of ``units`` are gathered, and start to gather those of ``ahead``."""
        if self._is_holding:
            return
        self._make(self._residency.need(units, ahead), is_exact=False)
        for unit in units:
            self._await(unit)
        self._residency.came(units)

    def bring(self, unit: Unit) -> None:
        """Wait until the weights of one unit are gathered in their own dtype; free all others."""
        self._make(self._residency.end())
        self._make(self._residency.need((unit,)))
        self._await(unit)

    def drop(self) -> None:
        """Free all full weights: the shards have changed, or a step is over."""
        self._make(self._residency.end())

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather all weights for the block. All ranks must call it."""
        self.drop()
        self._make(Moves(gathered=tuple(self._buckets)))
        for unit in self._buckets:
            self._await(unit)
        self._is_holding = True
        try:
            yield
        finally:
            self._is_holding = False
            for unit in self._buckets:
                self._free(unit)

    @contextmanager
    def one_by_one(self, unit_of: Mapping[str, Unit], *, writes: bool = False) -> Iterator[Opened]:
        """Yield a function that gathers the weights of a parameter by name, until its next call.

        All ranks must call it for the same names in the same order. ``writes``: the weights may be replaced, and this
        rank's shards are then kept.
        """
        opened = Opened(self, {n: unit for n, unit in unit_of.items() if unit in self._buckets}, writes=writes)
        try:
            yield opened
        finally:
            opened.close()

    def keep_own(self, unit: Unit) -> None:
        """Copy this rank's shard of a gathered bucket to the kept shard."""
        self._buckets[unit].keep_own()

    def _make(self, moves: Moves, *, is_exact: bool = True) -> None:
        """Free and gather by ``moves``. ``is_exact``: gather in the weights' own dtype."""
        for unit in moves.freed:
            self._free(unit)
        for unit in moves.gathered:
            bucket = self._buckets[unit]
            take_memory(bucket.parameters)
            whole, own = bucket.parameters, bucket.own_parameters
            if (sent_in := bucket.planned.gather) is not None and not is_exact:
                whole = self._sent[unit] = torch.empty_like(whole, dtype=sent_in)
                own = own.to(sent_in)
            self._works[unit] = all_gather(whole, own, group=bucket.shared_by.of_weights, async_op=True)
        held = sum(self._buckets[unit].parameters.nbytes for unit in self._residency.whole)
        self.most_bytes = max(self.most_bytes, held + sum(sent.nbytes for sent in self._sent.values()))

    def _await(self, unit: Unit) -> None:
        work, sent = self._works.pop(unit, None), self._sent.pop(unit, None)
        if work is not None:
            work.wait()
        if sent is not None:
            self._buckets[unit].parameters.copy_(sent)

    def _free(self, unit: Unit) -> None:
        self._await(unit)
        give_memory_back(self._buckets[unit].parameters)


class Opened:
    """The bucket of the parameter that was named last; only one bucket at a time is gathered."""

    def __init__(self, weights: WholeWeights, unit_of: Mapping[str, Unit], *, writes: bool) -> None:
        self._weights, self._unit_of, self._writes = weights, unit_of, writes
        self._unit: Unit | None = None

    def __call__(self, name: str) -> None:
        unit = self._unit_of.get(name)
        if unit is not None and unit != self._unit:
            self._keep()
            self._weights.bring(unit)
            self._unit = unit

    def close(self) -> None:
        self._keep()
        self._weights.drop()

    def _keep(self) -> None:
        if self._writes and self._unit is not None:
            self._weights.keep_own(self._unit)
        self._unit = None


class ScatteredGradients:
    """The reduction of sharded gradients. Owns their full memory. ``chunk_of``: id of a parameter → chunk, else 0."""

    def __init__(self, buckets: Iterable[BucketTensors], chunk_of: Mapping[int, int], unmixed: Unmixed) -> None:
        self._buckets = sorted(buckets, key=lambda bucket: bucket.position)
        self._unmixed = unmixed
        self._of_chunk: dict[int, list[BucketTensors]] = {}
        self._parameters: dict[tuple[int, int], list[int]] = {}
        for bucket in self._buckets:
            ids = [id(p) for slot in bucket.slots for p in slot.parameters]
            for chunk in sorted({chunk_of.get(key, 0) for key in ids}):
                self._of_chunk.setdefault(chunk, []).append(bucket)
                self._parameters[chunk, id(bucket)] = [key for key in ids if chunk_of.get(key, 0) == chunk]
        self._filled: set[int] = set()
        self._order: Sequence[BucketTensors] = ()
        self._next = 0
        self._pending: BucketTensors | None = None
        self._is_counting = False
        self.most_bytes = 0  # peak of full gradients

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def begin_step(self) -> None:
        """Forget all gradients, also those of an aborted step."""
        self._settle(keep=False)
        self._filled, self._order, self._next = set(), (), 0
        for bucket in self._buckets:
            self._close(bucket)

    def begin(self, chunk: int, *, is_alone: bool) -> None:
        """Begin a backward of ``chunk``. ``is_alone``: it computes all gradients of its microbatch, and no others."""
        self._order, self._next, self._is_counting = self._of_chunk.get(chunk, ()), 0, is_alone
        for bucket in self._order:
            ids = self._parameters[chunk, id(bucket)]
            bucket.missing = bucket.awaited(ids) if is_alone else {}

    def arrived(self, bucket: BucketTensors, parameter: Tensor) -> None:
        """Note that a contribution to the gradient of a parameter is in its bucket."""
        if self._is_counting:
            bucket.arrived(parameter)
            while self._next < len(self._order) and not self._order[self._next].missing:
                self._launch()

    def end(self) -> None:
        """End the current backward or W: reduce the remaining buckets, and wait."""
        while self._next < len(self._order):
            self._launch()
        self._settle()
        self._is_counting = False

    def finish(self) -> None:
        """End the step: zero the gradients of buckets that no backward has reduced."""
        for bucket in self._buckets:
            if id(bucket) not in self._filled:
                bucket.own_gradients.zero_()

    def _launch(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        bucket.open_gradients()
        for slot in bucket.slots:
            if slot.is_fresh:
                slot.main_grad.zero_()
        self._unmixed.see_gradients(bucket.slots)
        held = (each.gradients.untyped_storage().nbytes() for each in self._buckets)
        self.most_bytes = max(self.most_bytes, sum(held))
        self._settle()
        bucket.is_reducing = True
        own = bucket.gradients[bucket.own_range]
        bucket.work = reduce_scatter(own, bucket.gradients, group=bucket.shared_by.group, async_op=True)
        self._pending = bucket

    def _settle(self, *, keep: bool = True) -> None:
        """Wait for the running reduction, and add this rank's shard to its gradients."""
        bucket, self._pending = self._pending, None
        if bucket is None:
            return
        bucket.work.wait()
        own = bucket.gradients[bucket.own_range]
        if keep and id(bucket) in self._filled:
            bucket.own_gradients.add_(own)
        elif keep:
            bucket.own_gradients.copy_(own)
            self._filled.add(id(bucket))
        self._close(bucket)

    def _close(self, bucket: BucketTensors) -> None:
        give_memory_back(bucket.gradients)
        bucket.work, bucket.is_reducing = None, False
        for slot in bucket.slots:
            slot.is_fresh = True
