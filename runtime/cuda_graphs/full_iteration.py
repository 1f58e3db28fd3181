"""One CUDA graph for a step: forward and backward of all microbatches with their messages, without the optimizer.

    in      batch tensors of each microbatch, and the denominators that are read  → copied into static inputs
    graph   all actions in order; weight gradients are added to their buffers, messages between stages use buffers that
            were allocated before
    out     the sum of the losses, as a copy

Reductions over the data-parallel ranks, and the update, start after the graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.base import RankProgram
from passes.ops.random_state import Draw
from passes.program.program import BoundaryPlan
from runtime.cuda_graphs.graphs import Counted, Graph, Graphs, Maker, count_again, uncounted
from runtime.cuda_graphs.region_graphs import copy_in
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.slots import ParameterSlot
from runtime.pipeline.executor import Executor, Step
from runtime.pipeline.p2p import StaticBuffers


class FullIteration(Graphs):
    """The graph of a step, with its static inputs, its message buffers, and the generators of its random numbers."""

    def __init__(self, program: RankProgram, buffers: GradientBuffers, maker: Maker, device: torch.device) -> None:
        self._program, self._buffers, self._maker, self._device = program, buffers, maker, device
        self._axes = list(program.axes.values())
        self._read = sorted({index for stage in program.stages for index in stage.denominators})
        self._forget()

    def _forget(self) -> None:
        self._graph: Graph | None = None
        self._static: Step | None = None
        self._messages: StaticBuffers | None = None
        self._loss: Tensor | None = None
        self._counted: Counted = []
        self._generators: dict[Draw, torch.Generator] = {}
        self._added: list[ParameterSlot] = []

    def release(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._forget()
        self.is_on = self.holds_reductions = False

    def capture(self, executor: Executor, step: Step) -> None:
        self.release()
        random, self.holds_reductions = self._program.random, True
        self._static = static = self._copy_of(step)
        self._messages = messages = static_buffers(executor)
        with uncounted(self._axes), _aliases(self._program, self._buffers), executor.transport.lying_in(messages):
            with random.watched() as drawn:
                self._maker.warm_up(lambda: self._run(executor, static))
            self._generators = {draw: torch.Generator(self._device) for draw in drawn}
            self._buffers.begin_step()
            self._graph = self._maker.graph(self._maker.pool(), self._generators.values())
            self._put_generators(step)
            with random.drawing_by(self._generators, is_part=False), uncounted(self._axes) as self._counted:
                self._graph.capture(lambda: self._run(executor, static))
        self._added = [slot for slot in self._buffers.slots if not slot.is_fresh]
        self.is_on, self.is_wanted = True, False

    def _run(self, executor: Executor, static: Step) -> None:
        self._loss = executor.run(static)

    def run_step(self, executor: Executor, step: Step) -> Tensor | None:
        if not self.is_on:
            return executor.run(step)
        assert self._graph is not None
        assert self._static is not None
        copy_in(self._tensors(self._static), self._tensors(step))
        self._put_generators(step)
        self._graph.replay()
        self.num_replays += 1
        for slot in self._added:
            slot.is_fresh = False
        count_again(self._counted)
        loss = None if self._loss is None else self._loss.clone()
        self._maker.spoil(self._standing)
        return loss

    def _put_generators(self, step: Step) -> None:
        random = self._program.random
        random.begin(step.index, step.first_microbatch)
        for draw, generator in self._generators.items():
            random.put(generator, draw)

    @property
    def num_graphs(self) -> int:
        return 0 if self._graph is None else 1

    @property
    def static_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._standing)

    @property
    def _standing(self) -> list[Tensor]:
        inputs = [] if self._static is None else self._tensors(self._static)
        return [*inputs, *(self._messages.tensors if self._messages is not None else ())]

    def _copy_of(self, step: Step) -> Step:
        """Return the step with its values copied into new memory. The scale of the loss is static already."""
        microbatches = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in step.microbatches]
        denominators = [d.clone() if i in self._read else d for i, d in enumerate(step.denominators)]
        return Step(step.index, microbatches, step.first_microbatch, denominators, step.scale)

    def _tensors(self, step: Step) -> list[Tensor]:
        """Return the tensors of a step that are copied into static inputs before a replay."""
        batch = [tensor for tensors in step.microbatches for tensor in tensors.values()]
        return [*batch, *(step.denominators[i] for i in self._read)]


def static_buffers(executor: Executor) -> StaticBuffers:
    """Allocate the buffers of all messages of a step."""
    transport = executor.transport
    boundaries: list[Sequence[BoundaryPlan]] = [()] * (transport.num_stages - 1)
    for stage in executor.stages:
        if stage.receives:
            boundaries[stage.index - 1] = stage.receives
        if stage.sends:
            boundaries[stage.index] = stage.sends
    return StaticBuffers(boundaries, transport.orders or (executor.order,), transport.groups)


@contextmanager
def _aliases(program: RankProgram, buffers: GradientBuffers) -> Iterator[None]:
    """Give modules other leaves over the same memory, as the parameters are bound to the stream of eager steps."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    aliases: dict[int, nn.Parameter] = {}
    for module in (inner for stage in program.stages for inner in stage.module.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in aliases:
                aliases[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    buffers.watch(aliases[id(parameter)], parameter)
            replaced.append((module._parameters, name, parameter))
            module._parameters[name] = aliases[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
