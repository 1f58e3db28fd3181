"""Readers of a stream of weights: a function, or a directory of safetensors.

    begin(number of buckets)      take(bucket) …      end()         on rank 0

Any error of a function means that the reader is gone. A directory that cannot be written is a PlanError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, cast

from passes.errors import PlanError
from planner.files.atomic import name_beside, write_whole
from runtime.checkpoint.atomic_directory import sync, writing
from runtime.checkpoint.entries import Entry
from runtime.checkpoint.pretrained_save import index_of, is_weights, write_safetensors
from runtime.checkpoint.safetensors_files import INDEX, SINGLE
from runtime.checkpoint.stream import Bucket


class Target(Protocol):
    """A reader of a stream."""

    def begin(self, num_buckets: int) -> None: ...

    def take(self, bucket: Bucket) -> None: ...

    def end(self) -> None: ...


def target_of(to: object, texts: Mapping[str, Any]) -> Target:
    """Raises PlanError for anything else than a function or a directory."""
    if isinstance(to, (str, PathLike)):
        return DirectoryTarget(Path(cast(Any, to)), texts)
    if callable(to):
        return FunctionTarget(to)
    raise PlanError(
        f"weights cannot be streamed to a {type(to).__name__}",
        where="stream_weights",
        fix="give a function of a bucket or a directory; or iterate over engine.stream_weights()",
    )


class FunctionTarget:
    """Calls a function with each bucket."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function

    def begin(self, num_buckets: int) -> None:
        pass

    def take(self, bucket: Bucket) -> None:
        self._function(bucket)

    def end(self) -> None:
        pass


class DirectoryTarget:
    """A file for each bucket, which appears when it is complete; last the index, which a reader may wait for."""

    def __init__(self, directory: Path, texts: Mapping[str, Any]) -> None:
        self._directory, self._texts = directory, texts
        self._files: dict[str, list[Entry]] = {}
        self._num_buckets = 0

    def begin(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        with writing("the weights", self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._directory.iterdir(), key=lambda path: path.name != INDEX):  # the index first
                if is_weights(path.name):
                    path.unlink()
            for name, content in self._texts.items():
                write_whole(self._directory / name, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def take(self, bucket: Bucket) -> None:
        name = f"model-{len(self._files) + 1:05d}-of-{self._num_buckets:05d}.safetensors"
        name = SINGLE if self._num_buckets == 1 else name
        entries = [Entry(n, tuple(t.shape), t.dtype) for n, t in bucket.items()]
        entries.sort(key=lambda entry: -entry.dtype.itemsize)  # every tensor at a multiple of its element's size
        with writing("the weights", self._directory):
            partial = name_beside(self._directory / name)
            write_safetensors(partial, entries, iter(bucket[entry.name] for entry in entries))
            os.replace(partial, self._directory / name)
        self._files[name] = entries

    def end(self) -> None:
        with writing("the weights", self._directory):
            if self._num_buckets > 1:
                write_whole(self._directory / INDEX, json.dumps(index_of(self._files), indent=2, sort_keys=True) + "\n")
            sync(self._directory)
