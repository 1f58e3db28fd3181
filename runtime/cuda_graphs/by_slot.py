"""A rank's regions as graphs by slot: as many as microbatches are in flight, whatever the number of microbatches.

    capture     in the order of the schedule: forward 1..N of a slot, then backward N..1
    memory      one pool a slot: it runs in the order of its capture, however slots interleave

In a shared pool, working memory of one slot could overlap tensors that another slot saved for its backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.ops.region import RegionCall, run_eagerly
from passes.stage_module import RankProgram
from planner.pipeline.schedule import Action, Order
from planner.regions.static_memory import slots_of
from runtime.cuda_graphs.calls import calls_of
from runtime.cuda_graphs.graphs import Graphs, Maker
from runtime.cuda_graphs.region_graphs import Region, RegionGraphs
from runtime.optimizer.buffers import GradientBuffers
from runtime.pipeline.executor import Executor, Step


class GraphsBySlot(Graphs):
    """Runs each region of each microbatch by the graphs of its slot.

    Owns: the graphs of each (region, slot), and which of them run the microbatch that runs.
    """

    def __init__(
        self,
        program: RankProgram,
        order: Order,
        buffers: GradientBuffers,
        maker: Maker,
        device: torch.device,
        *,
        one_pool: bool = False,
    ) -> None:
        self.slots = slots_of(order)
        self._order, self._buffers, self._maker, self._device = order, buffers, maker, device
        self._one_pool = one_pool
        self._slot = 0
        self._graphs: dict[tuple[int, int], RegionGraphs] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)  # so that backwards come without other input
        self.random = program.random
        self.regions = regions_of(program)
        for region in (region for chunk in self.regions for region in chunk):
            region.call.run = self.run_region

    def before_forward(self, action: Action) -> None:
        self._slot = self.slots[action.chunk, action.microbatch]

    def run_region(self, call: RegionCall, inputs: Sequence[Tensor], held: Sequence[Any]) -> Sequence[Tensor]:
        """The outputs of a region for the microbatch that runs."""
        if not self.is_on or not torch.is_grad_enabled():
            return run_eagerly(call, inputs, held)
        graphs = self._graphs[call.index, self._slot]
        return _Replay.apply(self, graphs, len(inputs), *inputs, *graphs.region.shared, self._anchor)

    def release(self) -> None:
        for graphs in self._graphs.values():
            graphs.reset()
        self._graphs, self.is_on = {}, False

    def capture(self, executor: Executor, step: Step) -> None:
        self.release()
        pools: defaultdict[int, Any] = defaultdict(self._maker.pool)
        self.random.begin(0, 0)
        begun, ended = set[int](), set[int]()
        for action in self._order:
            slot = self.slots[action.chunk, action.microbatch]
            pool = pools[0 if self._one_pool else slot]
            if action.kind == "F" and slot not in begun:
                begun.add(slot)
                for region in self.regions[action.chunk]:
                    self._capture_forward(region, slot, pool)
            elif action.kind == "B" and slot not in ended:
                ended.add(slot)
                for region in backward_order(self.regions[action.chunk]):
                    self._graphs[region.call.index, slot].capture_backward(pool)
        self._buffers.add_in_graphs(p for graphs in self._graphs.values() for p in graphs.added)
        self.is_on, self.is_wanted = True, False

    def _capture_forward(self, region: Region, slot: int, pool: Any) -> None:
        graphs = RegionGraphs(region, self._maker, self._device)
        if not any(index == region.call.index for index, _ in self._graphs):
            graphs.warm_up()
        self._graphs[region.call.index, slot] = graphs
        graphs.capture_forward(pool)

    def ran_backward(self, graphs: RegionGraphs) -> None:
        """The graph has added gradients of weights: their buckets may be complete."""
        for parameter in graphs.added:
            self._buffers.arrived(parameter)

    @property
    def num_graphs(self) -> int:
        return sum(1 + graphs.region.has_backward for graphs in self._graphs.values())

    @property
    def static_bytes(self) -> int:
        return sum(graphs.num_bytes for graphs in self._graphs.values())


def backward_order(regions: Sequence[Region]) -> list[Region]:
    """The order in which a chunk's backward comes to its regions."""
    return list(reversed(regions))


def regions_of(program: RankProgram) -> list[list[Region]]:
    """For each chunk its regions, in the order in which they run."""
    read = (value for stage in program.stages for value in _read(stage.module))
    readers = Counter(id(value) for value in read)

    def region(call: RegionCall, held: list[Any]) -> Region:
        trained = [v for v in held if isinstance(v, nn.Parameter) and v.requires_grad]
        return Region(call, held, [v for v in trained if readers[id(v)] == 1], program.random)

    return [[region(call, held) for call, held in calls_of(stage)] for stage in program.stages]


def _read(module: fx.GraphModule) -> list[Any]:
    """The module's own tensors that ops read, one entry for each use."""
    nodes = module.graph.find_nodes(op="get_attr")
    return [attrgetter(node.target)(module) for node in nodes for _ in node.users]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: GraphsBySlot, graphs: RegionGraphs, count: int, *given: Any) -> Any:
        owner.num_replays += 1
        call, outputs = graphs.region.call, graphs.forward(given[:count])
        ctx.owner, ctx.graphs = owner, graphs
        constant = [out for out, b in zip(outputs, call.outputs, strict=False) if not b.requires_grad]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.owner.num_replays += 1
        call = ctx.graphs.region.call
        wanted = [g for g, b in zip(grads, call.outputs, strict=False) if b.requires_grad]
        of_inputs, of_shared = ctx.graphs.backward([*wanted, *grads[len(call.outputs) :]])
        ctx.owner.ran_backward(ctx.graphs)
        found = iter(of_inputs)
        return None, None, None, *(next(found) if b.requires_grad else None for b in call.inputs), *of_shared, None
