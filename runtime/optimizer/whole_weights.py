"""Weights of which each rank keeps its shard: a bucket has memory for all of it only while its weights are read.

    need(units, ahead)     free all others; gather the missing ones, those ``ahead`` beside products; wait for ``units``
    one_by_one()           one bucket at a time, for code that reads or writes weights between steps
    hold()                 all buckets at once, for a step in which every value is looked at

All ranks that share a bucket run the same ops in the same order, so they gather in the same order. The group of these
gathers is their own: on one communicator the weights that a product waits for would queue behind sums of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.sharding.residency import Moves, Residency, Unit
from runtime.optimizer.in_place import all_gather
from runtime.optimizer.slots import BucketTensors, give_memory_back, take_memory


class WholeWeights:
    """Owns the memory of full parameters of the buckets that it is given, by (buffer, bucket)."""

    def __init__(self, buckets: Mapping[Unit, BucketTensors], residency: Residency) -> None:
        self._buckets, self._residency = dict(buckets), residency
        self._works: dict[Unit, Any] = {}
        self._sent: dict[Unit, Tensor] = {}  # of weights that come in a smaller dtype
        self._is_holding = False
        self.most_bytes = 0  # of full weights at once

    def need(self, units: Sequence[Unit], ahead: Sequence[Unit] = ()) -> None:
        """Return when the weights of ``units`` are here; those of ``ahead`` are on their way."""
        if self._is_holding:
            return
        self._make(self._residency.need(units, ahead), is_exact=False)
        for unit in units:
            self._await(unit)
        self._residency.came(units)

    def bring(self, unit: Unit) -> None:
        """Return when the weights of one unit are here as their ranks have them; all others are freed."""
        self._make(self._residency.end())
        self._make(self._residency.need((unit,)))
        self._await(unit)

    def drop(self) -> None:
        """Free all: the shards have changed, or a step is over."""
        self._make(self._residency.end())

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, all are whole; the same call on all ranks."""
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
        """Inside, the weights of a parameter are here after a call with its name, until a call with another one.

        All ranks call it for the same names in the same order. ``writes``: they may be replaced, and this
        rank's shards of them are kept.
        """
        opened = Opened(self, {n: unit for n, unit in unit_of.items() if unit in self._buckets}, writes=writes)
        try:
            yield opened
        finally:
            opened.close()

    def keep_own(self, unit: Unit) -> None:
        """This rank's shard of a whole bucket takes the place of the kept one."""
        self._buckets[unit].keep_own()

    def _make(self, moves: Moves, *, is_exact: bool = True) -> None:
        """``is_exact``: weights are sent in their own dtype."""
        for unit in moves.freed:
            self._free(unit)
        for unit in moves.gathered:
            bucket = self._buckets[unit]
            take_memory(bucket.parameters)
            whole, own = bucket.parameters, bucket.own_parameters
            if bucket.gather is not None and not is_exact:
                whole = self._sent[unit] = torch.empty_like(whole, dtype=bucket.gather)
                own = own.to(bucket.gather)
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
    """One bucket at a time is whole: that of the parameter that was named last."""

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
