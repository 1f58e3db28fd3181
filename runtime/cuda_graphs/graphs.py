"""The interface between an engine and a backend of CUDA graphs: on a GPU, or recorded on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.pipeline.schedule import Action
from runtime.pipeline.executor import Executor, Step


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
