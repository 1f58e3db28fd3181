"""Streams the weights of an engine to a function, a directory or a loop: full tensors on rank 0, bucket by bucket,
under the names of files or of the model.

    for each bucket:   the ranks that hold shards → rank 0 → its reader        then its memory is freed

No rank ever holds a second full copy: rank 0 makes a bucket on request of its reader, and only then the others send.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast, overload

from torch import Tensor

from passes.errors import PlanError, first_line
from planner.capture.model.hub_format import in_its_dtype
from planner.files.atomic import name_beside, write_whole
from planner.files.text import writing
from runtime.checkpoint.atomic_directory import FIX, sync
from runtime.checkpoint.hub_tensors import Entry, by_any_name, check_names, file_name, filled, gathered
from runtime.checkpoint.merged import Outgoing, outgoing
from runtime.checkpoint.pretrained_save import index_of, is_weights, write_safetensors
from runtime.checkpoint.safetensors_files import INDEX
from runtime.distributed.agreement import agreed, broadcast_json, until_rank_0_is_done
from runtime.distributed.faults.faults import shared_call
from runtime.distributed.same_options import require_same
from runtime.engine.build import Running
from runtime.engine.weights import EngineWeights
from runtime.weights.shards import RankWeights

Reader = Callable[[Any], object] | str | PathLike[str]


class StreamWarning(UserWarning):
    """The warning that the reader of a stream of weights has failed; training can continue."""


BUCKET_BYTES = 256 << 20
NAMES = ("hf", "model", "all")
Bucket = dict[str, Tensor]


@dataclass(frozen=True)
class Stream:
    """The buckets of a stream. ``has_aliases``: a tied tensor has all its names. ``leads``: whether this is rank 0."""

    buckets: list[list[Entry]]
    out: Outgoing
    has_aliases: bool
    leads: bool

    def bucket(self, entries: Iterable[Entry], own: Mapping[str, Tensor]) -> Bucket:
        """Return the tensors of ``entries`` by name on rank 0; ``{}`` elsewhere."""
        named = by_any_name(entries) if self.has_aliases else {entry.name: entry for entry in entries}
        return gathered(named, self.out.reader(own), named, leads=self.leads)


def stream_of(weights: RankWeights, names: str, bucket_bytes: int, *, merged: bool) -> Stream:
    """Return the stream. All ranks must call it. Raises PlanError for names that this model does not have."""
    check_names(names, NAMES)
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {bucket_bytes}", where="bucket_bytes", fix="give a positive number of bytes")
    if names == "hf" and not merged and weights.plan.hub.adapted is not None:
        what = "peft has wrapped the planned model, and a reader of its base does not know its names"
        fix = "set merged=True for the base with the adapters merged, or names='all' for the model's own names"
        raise PlanError(what, where="stream_weights", fix=fix)
    out = outgoing(weights, "hf" if names == "hf" else "model", merged=merged)
    buckets = filled(out.entries, lambda entry: entry.num_bytes, bucket_bytes)
    return Stream(buckets, out, names == "all", weights.groups.rank == 0)


def reader_to(
    to: object, texts: Mapping[str, Any], num_buckets: int
) -> tuple[Callable[[Bucket], object], Callable[[], object]]:
    """Return functions to call with each bucket, and at the end.

    Raises PlanError if ``to`` is neither a function nor a writable directory.
    """
    if isinstance(to, (str, PathLike)):
        directory = Directory(Path(cast(Any, to)), texts, num_buckets)
        return directory.take, directory.end
    if callable(to):
        return to, lambda: None
    fix = "give a function of a bucket or a directory; or iterate over engine.stream_weights()"
    raise PlanError(f"weights cannot be streamed to a {type(to).__name__}", where="stream_weights", fix=fix)


class Directory:
    """A directory with one file per bucket, written atomically; last the index, which a reader may wait for."""

    def __init__(self, directory: Path, texts: Mapping[str, Any], num_buckets: int) -> None:
        self._directory, self._num_buckets = directory, num_buckets
        self._files: dict[str, list[Entry]] = {}
        with self._writing():
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._directory.iterdir(), key=lambda path: path.name != INDEX):  # first the index
                if is_weights(path.name):
                    path.unlink()
            for name, content in texts.items():
                write_whole(self._directory / name, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def take(self, bucket: Bucket) -> None:
        name = file_name(len(self._files), self._num_buckets)
        entries = sorted((Entry(n, tuple(t.shape), t.dtype) for n, t in bucket.items()), key=Entry.by_width)
        with self._writing():
            partial = name_beside(self._directory / name)
            write_safetensors(partial, entries, iter(bucket[entry.name] for entry in entries))
            os.replace(partial, self._directory / name)
        self._files[name] = entries

    def end(self) -> None:
        with self._writing():
            if self._num_buckets > 1:
                write_whole(self._directory / INDEX, json.dumps(index_of(self._files), indent=2, sort_keys=True) + "\n")
            sync(self._directory)

    def _writing(self) -> AbstractContextManager[None]:
        return writing("the weights", str(self._directory), FIX)


class EngineStream:
    """The stream of an engine's weights while it trains."""

    def __init__(self, running: Running, weights: EngineWeights) -> None:
        self.running, self._weights, self._groups = running, weights, running.groups

    @overload
    def stream_weights(
        self, to: None = None, *, names: str = "hf", merged: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[Bucket]: ...

    @overload
    def stream_weights(
        self, to: Reader, *, names: str = "hf", merged: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> bool: ...

    def stream_weights(
        self, to: Reader | None = None, *, names: str = "hf", merged: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[Bucket] | bool:
        """Stream full tensors in buckets of ``bucket_bytes``, without a second copy of the model.

        Call it on all ranks, between steps. Rank 0 gets the tensors, on the CPU; other ranks get empty buckets.
        ``to``: a function of a bucket, or a directory for a safetensors file per bucket and an index, written last;
        only rank 0's counts. None: return an iterator of buckets, for a loop that every rank runs.

        ``names``: "hf" and "model", those of ``save_pretrained``; "all", the model's, a tied tensor under each of its
        names. ``merged``: the base with the adapters of peft merged into it.

        Returns whether the reader took all; if it fails, rank 0 warns once, and training can continue. Raises PlanError
        on every rank for a directory that cannot be written.
        """
        stream = self._opened_stream(names, merged, bucket_bytes)
        return self._iterated(stream) if to is None else self._streamed(to, stream)

    @shared_call("stream")
    def _opened_stream(self, names: str, merged: bool, bucket_bytes: int) -> Stream:
        self._weights.ready()
        call = f"names={names}, merged={merged}, bucket_bytes={bucket_bytes}"
        require_same("the call of stream_weights", call, self._groups)
        return stream_of(self.running.weights, names, bucket_bytes, merged=merged)

    def _iterated(self, stream: Stream) -> Iterator[Bucket]:
        """Yield buckets until the loop ends; after an early end on this rank, it still sends its shards."""
        step, rest = self.running.step_index, list(stream.buckets)
        try:
            while rest:
                yield self._next_bucket(stream, rest.pop(0), step)
        finally:
            while rest and not self._groups.faults.activity.is_failing:
                self._next_bucket(stream, rest.pop(0), self.running.step_index)

    @shared_call("stream")
    def _next_bucket(self, stream: Stream, entries: Sequence[Entry], step: int) -> Bucket:
        if step != self.running.step_index:
            what = "a step has changed the weights in the middle of a stream"
            raise PlanError(what, where="stream_weights", fix="end the loop over the buckets before the next step")
        with self._weights.own() as own:
            return stream.bucket(entries, own)

    @shared_call("stream")
    def _streamed(self, to: Reader, stream: Stream) -> bool:
        reading, take, end = Reading(stream.leads), None, None
        with agreed(self._groups):
            if stream.leads:
                take, end = reader_to(to, in_its_dtype(stream.out.texts), len(stream.buckets))
        for entries in stream.buckets:
            reading.call(take, self._next_bucket(stream, entries, self.running.step_index))
        reading.call(end)
        until_rank_0_is_done(self._groups)
        with agreed(self._groups):
            if reading.refused is not None:
                raise reading.refused
        return broadcast_json(self._groups, reading.is_on)


class Reading:
    """The state of the reader on rank 0: after an error it is not called again. ``refused``: a PlanError, as of a
    directory that cannot be written.
    """

    def __init__(self, is_rank_0: bool) -> None:
        self.is_on = is_rank_0
        self.refused: PlanError | None = None

    def call(self, step: Callable[..., object] | None, *bucket: Bucket) -> None:
        if not self.is_on or step is None:
            return
        try:
            step(*bucket)
        except PlanError as error:
            self.is_on, self.refused = False, error
        except Exception as error:  # any error of the user's reader
            self.is_on = False
            text = f"the reader of the weights is gone, training continues: {first_line(error)}"
            warnings.warn(text, StreamWarning, stacklevel=2)
