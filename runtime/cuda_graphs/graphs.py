"""The interface between an engine and a backend of CUDA graphs, code that backends share, and graphs of torch.cuda.

Graphs of torch.cuda are captured on their own stream, in memory that each pool keeps. Other threads may call CUDA
during a capture (NCCL's watchdog queries events), so the capture fails only for errors of this thread. Collectives are
captured as NCCL kernels; earlier eager steps have created their communicators.

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

# axis, number of its collectives by (kind, phase), their bytes
Counted = list[tuple[AxisHandle, Counter[Any], Counter[Any]]]


class Graph(Protocol):
    """One graph: each ``replay`` runs the ops of ``capture`` again, at the same addresses."""

    def capture(self, body: Callable[[], None]) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None:
        """Free the graph, and its references to communicators of captured kernels. It cannot be replayed afterwards."""


class Maker(Protocol):
    """Makes graphs. Graphs of one ``pool`` share memory, and must be replayed in the order of their capture."""

    def pool(self) -> Any: ...
    def graph(self, pool: Any, generators: Collection[torch.Generator]) -> Graph: ...
    def warm_up(self, body: Callable[[], None]) -> None:
        """Run ``body`` once on the stream of the captures, so that no capture includes one-time set-up."""

    def spoil(self, tensors: Collection[Tensor]) -> None:
        """Mark these values as consumed; a recorded graph makes later reads fail."""


class Graphs(ABC):
    """Runs the regions or the step of a rank: as graphs while it ``is_on``, else, or without gradients, eagerly.

    ``is_wanted``: capture before the next step, replacing existing graphs. ``holds_reductions``: backwards of this step
    start no reductions over the data-parallel ranks, which no graph contains.
    """

    is_on = False
    is_wanted = False
    holds_reductions = False
    num_replays = 0

    @abstractmethod
    def capture(self, executor: Executor, step: Step) -> None:
        """Make the graphs. Gradients of this rank are undefined afterwards. All ranks must call it."""

    @abstractmethod
    def release(self) -> None:
        """Free all graphs, if there are any; regions run eagerly until the next capture.

        Called before any group ends, because NCCL does not end a communicator while a graph holds its kernels.
        """

    def run_step(self, executor: Executor, step: Step) -> Tensor | None:
        """Run forward and backward of a step; return the sum of this rank's losses."""
        return executor.run(step)

    def before_forward(self, action: Action) -> None:  # noqa: B027 -- not needed for one graph of a step
        """Prepare for a forward that a backward will follow."""

    @property
    @abstractmethod
    def num_graphs(self) -> int: ...

    @property
    @abstractmethod
    def static_bytes(self) -> int:
        """Bytes of static memory, without the tensors that graphs keep between a forward and its backward."""


class CudaGraphs:
    """Makes graphs of torch.cuda. Owns the stream on which they are captured."""

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
        """Do nothing, as it would launch a kernel for each tensor."""


class CudaGraph:
    """One graph. A replay draws from the current state of its generators."""

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
    """Yield the regions of a stage in the order of execution, each with its parameters, buffers and handles."""
    for node in stage.module.graph.find_nodes(op="call_function", target=run_region):
        handle, _, held = node.args
        yield attrgetter(handle.target)(stage.module), [attrgetter(n.target)(stage.module) for n in held]


def axes_of(values: Iterable[Any]) -> list[AxisHandle]:
    """Return the axes among handles, without duplicates."""
    return list({id(value): value for value in values if isinstance(value, AxisHandle)}.values())


@contextmanager
def uncounted(axes: Iterable[AxisHandle]) -> Iterator[Counted]:
    """Restore the counts of ``axes`` afterwards, and put the counts of the calls inside into the yielded list."""
    before = [(axis, axis.counts.copy(), axis.bytes.copy()) for axis in axes]
    counted: Counted = []
    try:
        yield counted
    finally:
        for axis, counts, sizes in before:
            counted.append((axis, axis.counts - counts, axis.bytes - sizes))
            axis.counts, axis.bytes = counts, sizes


def count_again(counted: Counted) -> None:
    """Add the counts of one more run."""
    for axis, counts, sizes in counted:
        axis.counts.update(counts)
        axis.bytes.update(sizes)
