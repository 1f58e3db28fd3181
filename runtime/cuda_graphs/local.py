"""Graphs of torch.cuda: captured on a stream of their own, in memory that each pool keeps.

Other threads may call CUDA while a graph is captured (NCCL's watchdog asks for events): an error is this thread's own.
Exchanges inside are captured as NCCL's kernels: their communicators were made by the real steps before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor


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
