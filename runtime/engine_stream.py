"""Weights of an engine as a stream, to a function, a directory, or a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any, overload

from passes.errors import PlanError, first_line
from runtime.checkpoint.stream import BUCKET_BYTES, Bucket, Item, Stream, stream_of
from runtime.checkpoint.stream_targets import Target, target_of
from runtime.distributed.agreement import agreed
from runtime.distributed.exchange_json import broadcast_json
from runtime.distributed.faults.shared_call import shared_call
from runtime.distributed.patience import until_rank_0_is_done
from runtime.engine_adapters import EngineAdapters

Reader = Callable[[Any], object] | str | PathLike[str]


class StreamWarning(UserWarning):
    """The reader of a stream of weights is gone; training can continue."""


class EngineStream(EngineAdapters):
    """What an Engine does to hand its weights on while it trains. The Engine owns all that is named here."""

    @overload
    def stream_weights(
        self,
        to: None = None,
        *,
        names: str = "hf",
        merged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Iterator[Bucket]: ...

    @overload
    def stream_weights(
        self,
        to: Reader,
        *,
        names: str = "hf",
        merged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> bool: ...

    def stream_weights(
        self,
        to: Reader | None = None,
        *,
        names: str = "hf",
        merged: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Iterator[Bucket] | bool:
        """Full tensors, in buckets of ``bucket_bytes``, without a second copy of the model.

        The same call on every rank, between steps; rank 0 has the tensors, on the CPU, the others get empty buckets.
        ``to``: a function of a bucket; or a directory, which gets a safetensors file for each bucket and last an
        index. Only rank 0's counts. Left out: an iterator of buckets, for a loop that every rank runs.

        ``names``: "hf" and "model", those of ``save_pretrained``; "all", the model's, a tied tensor under each of its
        names. ``merged``: the
        base with the adapters of peft merged into it.

        Returns whether the reader took all; if it fails, rank 0 warns once, and training can continue. Raises PlanError
        on every rank for a directory that cannot be written.
        """
        stream = self._opened_stream(names, merged, bucket_bytes)
        return self._iterated(stream) if to is None else self._streamed(to, stream)

    @shared_call("stream")
    def _opened_stream(self, names: str, merged: bool, bucket_bytes: int) -> Stream:
        self._ready()
        return stream_of(self.plan, self.groups, self._kept, names, bucket_bytes, merged=merged)

    def _iterated(self, stream: Stream) -> Iterator[Bucket]:
        """Buckets until the loop ends; after an early end on this rank it still sends its shards."""
        step, rest = self.step_index, list(stream.buckets)
        try:
            while rest:
                yield self._next_bucket(stream, rest.pop(0), step)
        finally:
            while rest and not self.groups.faults.activity.is_failing:
                self._next_bucket(stream, rest.pop(0), self.step_index)

    @shared_call("stream")
    def _next_bucket(self, stream: Stream, items: Sequence[Item], step: int) -> Bucket:
        if step != self.step_index:
            raise PlanError(
                "a step has changed the weights in the middle of a stream",
                where="stream_weights",
                fix="end the loop over the buckets before the next step",
            )
        self._ready()
        with self._own() as own:
            return stream.bucket(items, own)

    @shared_call("stream")
    def _streamed(self, to: Reader, stream: Stream) -> bool:
        reading = Reading(self.groups.rank == 0)
        with agreed(self.groups):
            target = target_of(to, stream.texts) if self.groups.rank == 0 else None
        reading.call(target, lambda target: target.begin(len(stream.buckets)))
        for items in stream.buckets:
            bucket = self._next_bucket(stream, items, self.step_index)
            reading.call(target, lambda target, bucket=bucket: target.take(bucket))
            del bucket
        reading.call(target, lambda target: target.end())
        until_rank_0_is_done(self.groups)
        with agreed(self.groups):
            reading.raise_refused()
        return broadcast_json(self.groups, reading.is_on)


class Reading:
    """Whether the reader on rank 0 still takes buckets: after an error it is not called again."""

    def __init__(self, is_rank_0: bool) -> None:
        self.is_on = is_rank_0
        self._refused: PlanError | None = None

    def call(self, target: Target | None, step: Callable[[Target], None]) -> None:
        if not self.is_on or target is None:
            return
        try:
            step(target)
        except PlanError as error:
            self.is_on, self._refused = False, error
        except Exception as error:  # of the reader's own, of any kind
            self.is_on = False
            told = f"the reader of the weights is gone, training continues: {first_line(error)}"
            warnings.warn(told, StreamWarning, stacklevel=2)

    def raise_refused(self) -> None:
        """The error of a directory that cannot be written, or of another bad target."""
        if self._refused is not None:
            raise self._refused
