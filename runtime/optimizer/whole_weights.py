"""Weights of which each rank keeps its shard: a bucket has memory for all of it only while its weights are read.

    need(units, ahead)     free all others; gather the missing ones, those ``ahead`` beside products; wait for ``units``
    hold()                 all buckets at once, for code that reads or writes weights between steps

All ranks that share a bucket run the same ops in the same order, so they gather in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from planner.sharding.residency import Moves, Residency, Unit
from runtime.optimizer.in_place import all_gather
from runtime.optimizer.slots import BucketTensors, give_memory_back, take_memory


class WholeWeights:
    """Owns the memory of full parameters of the buckets that it is given, by (buffer, bucket)."""

    def __init__(self, buckets: Mapping[Unit, BucketTensors], *, reshards: bool) -> None:
        self._buckets = dict(buckets)
        self._residency = Residency(reshards=reshards)
        self._works: dict[Unit, Any] = {}
        self._num_holding = 0
        self.most_bytes = 0  # of full weights at once, in needs

    def need(self, units: Sequence[Unit], ahead: Sequence[Unit] = ()) -> None:
        """Return when the weights of ``units`` are here; those of ``ahead`` are on their way."""
        if self._num_holding:
            return
        self._make(self._residency.need(units, ahead))
        held = sum(self._buckets[unit].parameters.nbytes for unit in self._residency.whole)
        self.most_bytes = max(self.most_bytes, held)
        for unit in units:
            self._await(unit)

    def drop(self) -> None:
        """Free all: the shards have changed, or a step is over."""
        self._make(self._residency.end())

    @contextmanager
    def hold(self, *, writes: bool = False) -> Iterator[None]:
        """Inside, all are whole; ``writes``: what is written into them is this rank's shard afterwards.

        The same call on all ranks.
        """
        if self._num_holding == 0:
            self.drop()
            self._make(Moves(gathered=tuple(self._buckets)))
            for unit in self._buckets:
                self._await(unit)
        self._num_holding += 1
        try:
            yield
        finally:
            self._num_holding -= 1
            if writes:
                for bucket in self._buckets.values():
                    bucket.keep_own()
            if self._num_holding == 0:
                for unit in self._buckets:
                    self._free(unit)

    def _make(self, moves: Moves) -> None:
        for unit in moves.freed:
            self._free(unit)
        for unit in moves.gathered:
            bucket = self._buckets[unit]
            take_memory(bucket.parameters)
            self._works[unit] = all_gather(
                bucket.parameters, bucket.own_parameters, group=bucket.shared_by.group, async_op=True
            )

    def _await(self, unit: Unit) -> None:
        work = self._works.pop(unit, None)
        if work is not None:
            work.wait()

    def _free(self, unit: Unit) -> None:
        self._await(unit)
        give_memory_back(self._buckets[unit].parameters)
