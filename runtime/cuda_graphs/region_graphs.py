"""The two graphs of one region in one slot, and the static memory between them and the eager ops around.

    forward     inputs → copied into static inputs → [ region → static outputs ]
    backward    gradients → copied into static gradients → [ region's backward → static gradients, weights' += ]

[ ] is captured. Products add the gradients of their weights to the buffers, as in eager steps. The graph adds the
gradient of any other weight that only this region reads; gradients of shared weights are outputs, which autograd sums
in its order.

A rank has such graphs for each slot. The number of slots is the maximum number of microbatches in flight.

    capture     in the order of the schedule: forward 1..N of a slot, then backward N..1
    memory      one pool per slot, whose graphs run in the order of their capture even if slots interleave

In one pool for all slots, working memory of a slot could overlap tensors that another slot has saved for its backward.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from passes.base import RankProgram
from passes.ops.random_state import Draw, RandomState
from passes.ops.region import RegionCall, run_eagerly
from passes.ops.weight_gradients import AtOnce
from passes.program.program import BoundaryPlan
from planner.pipeline.schedule import Action, Order
from planner.regions.static_memory import slots_of
from runtime.cuda_graphs.graphs import Counted, Graph, Graphs, Maker, axes_of, calls_of, count_again, uncounted
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.slots import Added, ParameterPlace
from runtime.pipeline.executor import Executor, Step


class Region:
    """A region to capture: its call, and the ``held`` values (parameters, buffers, handles) that it reads.

    ``own``: weights that only this region reads. ``generators``: of its random numbers, set before each replay.
    """

    def __init__(self, call: RegionCall, held: Sequence[Any], own: Sequence[nn.Parameter], random: RandomState) -> None:
        self.call, self.held, self.own, self.random = call, tuple(held), tuple(own), random
        self.axes = axes_of(held)
        self.generators: dict[Draw, torch.Generator] = {}
        self.handle = next((value for value in held if isinstance(value, AtOnce)), None)
        self.trained = {id(v): v for v in held if isinstance(v, nn.Parameter) and v.requires_grad}
        self.shared = [v for key, v in self.trained.items() if key not in map(id, self.own)]

    @property
    def has_backward(self) -> bool:
        return any(b.requires_grad for b in self.call.outputs)

    def put_generators(self) -> None:
        """Set each generator to the first draw of the current microbatch."""
        self.random.put_all(self.generators)


class RegionGraphs:
    """The two graphs of one region in one slot, and their static memory."""

    def __init__(self, region: Region, maker: Maker, device: torch.device) -> None:
        call = region.call
        self.region, self._maker = region, maker
        self.inputs, self.outputs = _zeros(call.inputs, device), _zeros(call.outputs, device)
        self.of_inputs = _zeros((b for b in call.inputs if b.requires_grad), device)
        self.of_outputs = _zeros((b for b in call.outputs if b.requires_grad), device)
        self.of_later = _zeros((call.inputs[i] for i in call.through), device)
        maker.spoil(self._static)
        self.of_shared: list[Tensor | None] = []
        self.added: list[nn.Parameter] = []  # one entry for each time that the backward adds to a gradient
        self._forward: tuple[Graph, Counted] | None = None
        self._backward: tuple[Graph, Counted] | None = None
        self._drawn = (0, 0)  # step and microbatch of the last forward

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._static)

    @property
    def _static(self) -> list[Tensor]:
        return [*self.inputs, *self.outputs, *self.of_inputs, *self.of_outputs, *self.of_later]

    # ---- the capture

    def warm_up(self) -> None:
        """Run forward and backward once, and make a generator for each of their draws."""
        random, device = self.region.random, self._static[0].device

        def body() -> None:
            self._run()
            self._run_backward()

        with uncounted(self.region.axes), random.watched() as drawn:
            self._maker.warm_up(body)
        self.region.generators = {draw: torch.Generator(device) for draw in drawn}

    def capture(self, pool: Any, *, backward: bool) -> None:
        if not backward:
            self._forward = self._captured(pool, self._run)
        elif self.region.has_backward:
            self._backward = self._captured(pool, self._run_backward)

    def _captured(self, pool: Any, body: Callable[[], None]) -> tuple[Graph, Counted]:
        region = self.region
        graph = self._maker.graph(pool, region.generators.values())
        region.put_generators()
        with region.random.drawing_by(region.generators, is_part=True), uncounted(region.axes) as counted:
            graph.capture(body)
        return graph, counted

    def _run(self) -> None:
        """Run the region, from its static inputs to its static outputs."""
        call = self.region.call
        with torch.enable_grad():
            # new leaves: the parameters themselves are bound to the stream of eager steps, and have hooks
            leaves = [_leaf(s, b.requires_grad) for s, b in zip(self.inputs, call.inputs, strict=True)]
            held = {id(v): _leaf(v, v.requires_grad) for v in self.region.held if isinstance(v, nn.Parameter)}
            of_leaf = {id(leaf): self.region.trained[key] for key, leaf in held.items() if leaf.requires_grad}
            handle = self.region.handle  # products inside add to the buffers themselves
            with nullcontext() if handle is None else handle.bound_to(_Places(of_leaf, self.added)):
                results = call.module(*leaves, *(held.get(id(value), value) for value in self.region.held))
            through = [leaves[i].view_as(leaves[i]) for i in call.through]  # last, so that its gradient comes first
        with torch.no_grad():
            copy_in(self.outputs, results)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._weights = [held[id(weight)] for weight in (*self.region.own, *self.region.shared)]
        results = [value for value, b in zip(results, call.outputs, strict=True) if b.requires_grad]
        self._edges = [get_gradient_edge(v) if v.requires_grad else None for v in (*results, *through)]

    def _run_backward(self) -> None:
        statics, leaves = (*self.of_outputs, *self.of_later), [*self._leaves, *self._weights]
        seeds = [(edge, static) for edge, static in zip(self._edges, statics, strict=True) if edge is not None]
        computed: Sequence[Tensor | None] = [None] * len(leaves)
        self.added.clear()
        if seeds and leaves:
            edges, gradients = zip(*seeds, strict=True)
            computed = torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
        of_weights = computed[len(self._leaves) :]
        with torch.no_grad():
            for static, gradient in zip(self.of_inputs, computed, strict=False):
                static.zero_() if gradient is None else static.copy_(gradient)
            own = list(zip(self.region.own, of_weights, strict=False))
            for parameter, gradient in own:
                if gradient is not None:
                    parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
        self.added += [parameter for parameter, gradient in own if gradient is not None]
        self.of_shared = list(of_weights[len(own) :])

    def reset(self) -> None:
        """Free both graphs."""
        for graph, _ in filter(None, (self._forward, self._backward)):
            graph.reset()

    # ---- the replay

    def forward(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Replay the forward; return the outputs, and the inputs that pass through."""
        copy_in(self.inputs, values)
        self.region.put_generators()
        self._drawn = self.region.random.step, self.region.random.microbatch
        self._replay(self._forward)
        return [*(static.detach() for static in self.outputs), *(values[i].detach() for i in self.region.call.through)]

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of inputs and shared weights, from those of the outputs and of inputs passed through."""
        for static, value in zip((*self.of_outputs, *self.of_later), gradients, strict=True):
            static.zero_() if value is None else static.copy_(value)
        region = self.region
        with region.random.again(*self._drawn):  # a backward repeats the draws of its microbatch's forward
            region.random.put_all({draw: generator for draw, generator in region.generators.items() if draw.again})
            self._replay(self._backward)
        # copies, because a send or a leaf may keep them beyond the next replay
        of_inputs = [static.clone() for static in self.of_inputs]
        of_shared = [None if gradient is None else gradient.clone() for gradient in self.of_shared]
        self._maker.spoil(self._static)
        return of_inputs, of_shared

    def _replay(self, captured: tuple[Graph, Counted] | None) -> None:
        assert captured is not None, f"{self.region.call} is replayed, but was not captured"
        graph, counted = captured
        graph.replay()
        count_again(counted)


class _Places:
    """The gradient memory to which a captured region always adds, as one graph serves every microbatch."""

    def __init__(self, parameter_of: dict[int, nn.Parameter], added: list[nn.Parameter]) -> None:
        self._parameter_of, self._added = parameter_of, added

    def place_of(self, parameter: Tensor) -> ParameterPlace | None:
        own = self._parameter_of.get(id(parameter))
        return None if own is None else ParameterPlace(Added(own.main_grad), own, self._added.append)  # pyright: ignore


def copy_in(statics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for static, value in zip(statics, values, strict=True):
        static.copy_(value)


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def _zeros(values: Iterable[BoundaryPlan], device: torch.device) -> list[Tensor]:
    return [torch.zeros(b.shape, dtype=getattr(torch, b.dtype), device=device) for b in values]


class GraphsBySlot(Graphs):
    """Runs each region of each microbatch by the graphs of its slot."""

    def __init__(
        self,
        program: RankProgram,
        order: Order,
        buffers: GradientBuffers,
        maker: Maker,
        device: torch.device,
    ) -> None:
        self.slots = slots_of(order)
        self._order, self.buffers, self._maker, self._device = order, buffers, maker, device
        self._slot = 0
        self._graphs: dict[tuple[int, int], RegionGraphs] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)  # makes autograd call every backward
        self.random = program.random
        self.regions = regions_of(program)
        for region in (region for chunk in self.regions for region in chunk):
            region.call.run = self.run_region

    def before_forward(self, action: Action) -> None:
        self._slot = self.slots[action.chunk, action.microbatch]

    def run_region(self, call: RegionCall, inputs: Sequence[Tensor], held: Sequence[Any]) -> Sequence[Tensor]:
        """Return the outputs of a region for the current microbatch."""
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
            pool = pools[slot]
            if action.kind == "F" and slot not in begun:
                begun.add(slot)
                for region in self.regions[action.chunk]:
                    self._capture_forward(region, slot, pool)
            elif action.kind == "B" and slot not in ended:
                ended.add(slot)
                for region in backward_order(self.regions[action.chunk]):
                    self._graphs[region.call.index, slot].capture(pool, backward=True)
        self.buffers.add_in_graphs(p for graphs in self._graphs.values() for p in graphs.added)
        self.is_on, self.is_wanted = True, False

    def _capture_forward(self, region: Region, slot: int, pool: Any) -> None:
        graphs = RegionGraphs(region, self._maker, self._device)
        if not any(index == region.call.index for index, _ in self._graphs):
            graphs.warm_up()
        self._graphs[region.call.index, slot] = graphs
        graphs.capture(pool, backward=False)

    @property
    def num_graphs(self) -> int:
        return sum(1 + graphs.region.has_backward for graphs in self._graphs.values())

    @property
    def static_bytes(self) -> int:
        return sum(graphs.num_bytes for graphs in self._graphs.values())


def backward_order(regions: Sequence[Region]) -> list[Region]:
    """Return the order in which a chunk's backward reaches its regions."""
    return list(reversed(regions))


def regions_of(program: RankProgram) -> list[list[Region]]:
    """Return the regions of each chunk in the order of execution."""
    nodes = [(m, n) for m in (stage.module for stage in program.stages) for n in m.graph.find_nodes(op="get_attr")]
    readers = Counter(id(attrgetter(node.target)(module)) for module, node in nodes for _ in node.users)

    def region(call: RegionCall, held: list[Any]) -> Region:
        trained = [v for v in held if isinstance(v, nn.Parameter) and v.requires_grad]
        return Region(call, held, [v for v in trained if readers[id(v)] == 1], program.random)

    return [[region(call, held) for call, held in calls_of(stage)] for stage in program.stages]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: GraphsBySlot, graphs: RegionGraphs, count: int, *inputs: Any) -> Any:
        owner.num_replays += 1
        call, outputs = graphs.region.call, graphs.forward(inputs[:count])
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
        for parameter in ctx.graphs.added:  # the graph has added their gradients, which may complete their buckets
            ctx.owner.buffers.arrived(parameter)
        gradients = iter(of_inputs)
        return None, None, None, *(next(gradients) if b.requires_grad else None for b in call.inputs), *of_shared, None
