"""A process group of ranks of one host: sums and gathers over shared memory, all else over gloo.

Over gloo an all-reduce of a megabyte costs some ten times the processor time of the additions in it: two trips through
the network's code and a thread that waits for them. Here a rank adds what lies before it. What was put when the
collective began is read where it is waited for; no thread works between.

Results are those of gloo but for the order of sums of more than two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.profiler import record_function

from runtime.distributed.shared_memory import collectives
from runtime.distributed.shared_memory.neighbours import Neighbours
from runtime.distributed.shared_memory.rounds import NUM_BYTES, Exchange, Round, Rounds

BACKEND = "gloo_shared_memory"
# A subclass in Python would call these with the interpreter's lock held, and a thread of gloo that lets go of a tensor
# waits for that lock with gloo's own in its hand. So they go to a group of torch's own class, which lets it go.
_LEFT = (
    *("all_gather_single_coalesced", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce"),
    *("all_to_all_single", "alltoall", "alltoall_base", "allreduce_coalesced", "broadcast", "gather", "scatter"),
    *("send", "recv", "recv_anysource", "barrier", "monitored_barrier", "abort", "set_timeout"),
)
_TAKEN = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def register() -> None:
    """Make ``BACKEND`` a name that ``torch.distributed.new_group`` knows."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, SharedMemoryGroup, devices=["cpu"])


class SharedMemoryGroup(ProcessGroup):
    """Owns: its neighbours and the gloo group that carries all that is not overridden here."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] - the other constructor
        gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        self._gloo = ProcessGroup(store, rank, size)
        for group in (self, self._gloo):
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._place, self._size = rank, size
        self._neighbours = Neighbours(PrefixStore("memory", store), rank, size, NUM_BYTES, timeout)
        self._rounds = Rounds(self._neighbours, self._name_of)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        reduction = collectives.reduction(opts.reduceOp)
        if reduction is None or not _is_taken(tensors[0]):
            return self._gloo.allreduce(tensors, opts)
        x = tensors[0].detach().view(-1)
        return self._begin("all_reduce", x, collectives.all_reduce(x, reduction, self._place, self._size))

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        reduction = collectives.reduction(opts.reduceOp)
        if reduction is None or not _is_taken(inputTensor):
            return self._gloo._reduce_scatter_base(outputTensor, inputTensor, opts)
        own, whole = outputTensor.detach().view(-1), inputTensor.detach().view(-1)
        return self._begin(
            "reduce_scatter", whole, collectives.reduce_scatter(own, whole, reduction, self._place, self._size)
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not _is_taken(input):
            return self._gloo._allgather_base(output, input, opts)
        whole, own = output.detach().view(-1), input.detach().view(-1)
        return self._begin("all_gather", whole, collectives.all_gather(whole, own, self._size))

    reduce_scatter_single, all_gather_single = _reduce_scatter_base, _allgather_base  # their names since torch 2.13

    def shutdown(self) -> None:
        self._neighbours.close()
        self._gloo.shutdown()

    def _begin(self, kind: str, x: Tensor, rounds: Iterator[Round]) -> _Work:
        exchange = Exchange(f"{kind} of {x.numel()} {str(x.dtype).removeprefix('torch.')}", rounds)
        with _shown(kind):
            self._rounds.begin(exchange)
        return _Work(partial(self._rounds.finish, exchange), kind)

    def _name_of(self, place: int) -> str:
        return f"rank {dist.get_global_rank(self, place)}"


def _left_to_gloo(name: str) -> Callable[..., Any]:
    def call(self: SharedMemoryGroup, *args: Any, **named: Any) -> Any:
        return getattr(self._gloo, name)(*args, **named)

    return call


for _name in _LEFT:
    if hasattr(ProcessGroup, _name):  # not all in every torch
        setattr(SharedMemoryGroup, _name, _left_to_gloo(_name))


class _Work(dist.Work):
    def __init__(self, finish: Callable[[], None], kind: str) -> None:
        super().__init__()
        self._finish, self._kind = finish, kind

    def wait(self, timeout: timedelta | None = None) -> bool:
        """``timeout`` is the group's."""
        with _shown(self._kind):
            self._finish()
        return True


def _is_taken(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _TAKEN


def _shown(kind: str) -> AbstractContextManager[Any]:
    """To a profiler that looks."""
    return record_function(f"c10d::{kind}") if torch.autograd._profiler_enabled() else nullcontext()
