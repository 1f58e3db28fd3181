"""The interface between an engine and a backend of CUDA graphs, what backends share, and graphs of torch.cuda.

Those are captured on a stream of their own, in memory that each pool keeps. Other threads may call CUDA while a graph
is captured (NCCL's watchdog asks for events): an error is this thread's own. Exchanges inside are captured as NCCL's
kernels: their communicators were made by the real steps before.

A replay runs no Python: collectives of regions are counted at the capture, and again at each replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from passes.base import StageModule
from passes.ops.axis import AxisHandle
from passes.ops.region import RegionCall, run_region
from planner.pipeline.schedule import Action
from runtime.pipeline.executor import Executor, Step

# for each axis its collectives by (kind, phase), and their bytes
Counted = list[tuple[AxisHandle, Counter[Any], Counter[Any]]]


class Graph(Protocol):
    """One graph: each ``replay`` runs the ops of ``capture`` again, at the same addresses."""

    def capture(self, body: Callable[[], None]) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None:
        """Free the graph, and its references to communicators of captured kernels. It cannot be replayed afterwards."""


class Maker(Protocol):
    """How graphs are made. Those of one ``pool`` share memory, and are to be replayed in the order of their capture."""

    def pool(self) -> Any: ...
    def graph(self, pool: Any, generators: Collection[torch.Generator]) -> Graph: ...
    def warm_up(self, body: Callable[[], None]) -> None:
        """Run ``body`` once on the stream of the captures, so that no capture makes anything for the first time."""

    def spoil(self, tensors: Collection[Tensor]) -> None:
        """Mark these values as consumed; a recorded graph makes later reads fail."""


class Graphs(ABC):
    """Runs the regions or the step of a rank, as graphs once it ``is_on``, and eagerly before and without gradients.

    ``is_wanted``: capture before the next step, replacing graphs if there are any. ``holds_reductions``: backwards of
    this step start no reduction over the data-parallel ranks, as no graph has them. Owns: the count of replays.
    """

    is_on = False
    is_wanted = False
    holds_reductions = False
    num_replays = 0

    @abstractmethod
    def capture(self, executor: Executor, step: Step) -> None:
        """Make the graphs. Gradients of this rank are anything after it; all ranks call it alike."""

    @abstractmethod
    def release(self) -> None:
        """Free all graphs; regions run eagerly until the next capture. Again: nothing.

        NCCL does not end a communicator while a graph holds its kernels, so this comes before any group ends.
        """

    def run_step(self, executor: Executor, step: Step) -> Tensor | None:
        """Forward and backward of a step; the sum of this rank's losses."""
        return executor.run(step)

    def before_forward(self, action: Action) -> None:  # noqa: B027 -- one graph for all need not know
        """A forward that a backward will follow begins."""

    @property
    @abstractmethod
    def num_graphs(self) -> int: ...

    @property
    @abstractmethod
    def static_bytes(self) -> int:
        """Bytes of static memory, besides the tensors that graphs keep between a forward and its backward."""


class CudaGraphs:
    """Makes graphs of torch.cuda. Owns: the stream on which they are captured."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def graph(self, pool: Any, generators: Collection[torch.Generator]) -> CudaGraph:
        return CudaGraph(pool, generators, self._stream)

    def warm_up(self, body: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)

    def spoil(self, tensors: Collection[Tensor]) -> None:
        """Nothing: a kernel for each would be launched."""


class CudaGraph:
    """One graph. Its generators have seed and place of the day when it is replayed."""

    def __init__(self, pool: Any, generators: Collection[torch.Generator], stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)

    def capture(self, body: Callable[[], None]) -> None:
        with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


def calls_of(stage: StageModule) -> Iterator[tuple[RegionCall, list[Any]]]:
    """The regions of a stage in the order in which they run, each with its parameters, buffers and handles."""
    for node in stage.module.graph.find_nodes(op="call_function", target=run_region):
        handle, _, held = node.args
        yield attrgetter(handle.target)(stage.module), [attrgetter(n.target)(stage.module) for n in held]


def axes_of(values: Iterable[Any]) -> list[AxisHandle]:
    """The axes among handles, each once."""
    return list({id(value): value for value in values if isinstance(value, AxisHandle)}.values())


@contextmanager
def uncounted(axes: Iterable[AxisHandle]) -> Iterator[Counted]:
    """Afterwards the counts are as before; the yielded list then holds the counts of the calls inside."""
    before = [(axis, axis.counts.copy(), axis.bytes.copy()) for axis in axes]
    counted: Counted = []
    try:
        yield counted
    finally:
        for axis, counts, sizes in before:
            counted.append((axis, axis.counts - counts, axis.bytes - sizes))
            axis.counts, axis.bytes = counts, sizes


def count_again(counted: Counted) -> None:
    """As if it had run once more."""
    for axis, counts, sizes in counted:
        axis.counts.update(counts)
        axis.bytes.update(sizes)
