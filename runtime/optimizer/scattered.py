"""Gradients of which each rank keeps its shard (zero 2 and 3): every backward sums and scatters those of a bucket.

    last gradient of a microbatch of a bucket   ->   reduce-scatter starts; one is under way while the next bucket fills
    own gradients = shard                            first microbatch of the step
    own gradients += shard                           the others

A backward with gradients of weights that wait for a W of the schedule scatters at the end of the W: what lies in a
bucket then may be of other microbatches too, which changes no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from runtime.optimizer.in_place import reduce_scatter
from runtime.optimizer.slots import BucketTensors, give_memory_back
from runtime.optimizer.unmixed import Unmixed

Entry = tuple[int, int, BucketTensors]  # (buffer, bucket, its tensors)


class ScatteredGradients:
    """Owns the memory of full gradients. ``chunk_of``: the chunk of a parameter, by its id; left out, 0.

    ``launches``: (buffer, bucket) of the reductions of the step, in their order.
    """

    def __init__(self, entries: Iterable[Entry], chunk_of: Mapping[int, int], unmixed: Unmixed) -> None:
        self._entries = sorted(entries, key=lambda entry: entry[2].position)
        self._unmixed = unmixed
        self.launches: list[tuple[int, int]] = []
        self._of_chunk: dict[int, list[Entry]] = {}
        self._parameters: dict[tuple[int, int], list[int]] = {}
        for entry in self._entries:
            ids = [id(p) for slot in entry[2].slots for p in slot.parameters]
            for chunk in sorted({chunk_of.get(key, 0) for key in ids}):
                self._of_chunk.setdefault(chunk, []).append(entry)
                self._parameters[chunk, id(entry[2])] = [key for key in ids if chunk_of.get(key, 0) == chunk]
        self._filled: set[int] = set()
        self._order: Sequence[Entry] = ()
        self._next = 0
        self._pending: Entry | None = None
        self._is_counting = False
        self.most_bytes = 0  # of full gradients at once

    def __bool__(self) -> bool:
        return bool(self._entries)

    def begin_step(self) -> None:
        """Forget all gradients, also those of a step that was broken off."""
        self._settle(keep=False)
        self._filled, self.launches, self._order, self._next = set(), [], (), 0
        for *_, bucket in self._entries:
            self._close(bucket)

    def begin(self, chunk: int, *, is_alone: bool) -> None:
        """A backward of ``chunk`` begins. ``is_alone``: all gradients that come are of its microbatch, and all of them
        come."""
        self._order, self._next, self._is_counting = self._of_chunk.get(chunk, ()), 0, is_alone
        for *_, bucket in self._order:
            ids = self._parameters[chunk, id(bucket)]
            bucket.missing = bucket.awaited(ids) if is_alone else {}

    def arrived(self, bucket: BucketTensors, parameter: Tensor) -> None:
        """One contribution to the gradient of a parameter is in its bucket."""
        if self._is_counting:
            bucket.arrived(parameter)
            while self._next < len(self._order) and not self._order[self._next][2].missing:
                self._launch()

    def end(self) -> None:
        """The gradients of the backward, or W, that began last are all here: reduce the rest, and wait."""
        while self._next < len(self._order):
            self._launch()
        self._settle()
        self._is_counting = False

    def finish(self) -> None:
        """The step is over: a bucket that no backward has reduced has gradients of zero."""
        for *_, bucket in self._entries:
            if id(bucket) not in self._filled:
                bucket.own_gradients.zero_()

    def _launch(self) -> None:
        entry = self._order[self._next]
        self._next += 1
        buffer, index, bucket = entry
        self.launches.append((buffer, index))
        bucket.open_gradients()
        for slot in bucket.slots:
            if slot.is_fresh:
                slot.main_grad.zero_()
        self._unmixed.see_gradients(bucket.slots)
        held = (bucket.gradients.untyped_storage().nbytes() for *_, bucket in self._entries)
        self.most_bytes = max(self.most_bytes, sum(held))
        self._settle()
        bucket.is_reducing = True
        own = bucket.gradients[bucket.own_range]
        bucket.work = reduce_scatter(own, bucket.gradients, group=bucket.shared_by.group, async_op=True)
        self._pending = entry

    def _settle(self, *, keep: bool = True) -> None:
        """Wait for the reduction that is under way, and add this rank's shard to its gradients."""
        if self._pending is None:
            return
        *_, bucket = self._pending
        self._pending = None
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
