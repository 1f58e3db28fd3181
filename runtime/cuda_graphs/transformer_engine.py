"""CUDA graphs captured by make_graphed_callables of Transformer Engine: a pair for each region and microbatch.

    capture    once: every region as a module, the order of the rank, static inputs        (te_arguments)
    forward    inputs → the callable of (region, microbatch) → outputs, in the graph's memory
    backward   autograd runs the callable's own; gradients of the inputs are copied out at once

Outputs are read only until the backward of their microbatch. Gradients of inputs are copied, because autograd may keep
them for a sum while the next backward overwrites them.

Regions are captured as modules:

    module(*inputs) = region(*inputs, *held), with a gradient; without; None, …       held: parameters, buffers, handles

Modules with equal signatures of outputs with gradients share memory for these gradients, at the positions of the first
such module. Therefore all modules return equally many outputs, those without a gradient last.

Random numbers are equal to those of eager ops: Transformer Engine's tracker of generators, which registers all of them
with every graph, has one for each draw of a region, and each is set before a replay. A graph advances its generator
only at its capture.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from passes.base import RankProgram
from passes.errors import PlanError, imported
from passes.interceptors import installed
from passes.ops.random_state import Draw, RandomState
from passes.ops.region import RegionCall, run_eagerly
from planner.pipeline.message_slots import order_by_microbatch
from planner.pipeline.schedule import Action, Order
from runtime.compiled.requirements import EXTRA
from runtime.cuda_graphs.graphs import Counted, Graphs, axes_of, calls_of, count_again, uncounted
from runtime.cuda_graphs.te_arguments import (
    WHERE,
    GraphArguments,
    check_autocast,
    check_microbatches,
    numbered,
    sample_args_of,
    sample_index,
    signed_order,
)
from runtime.pipeline.executor import Executor, Step

FORWARD, BACKWARD = "forward", "backward"
DISTRIBUTED = "transformer_engine.pytorch.distributed"


class TransformerEngineGraphs(Graphs):
    """Runs the regions of a rank by graphs of Transformer Engine while it ``is_on``, else eagerly.

    ``order``: of this pp rank. ``no_gradient_hooks()``: a context in which gradients stay in ``.grad``. Raises
    PlanError for an order or a region that the graphs cannot run.
    """

    def __init__(
        self,
        program: RankProgram,
        order: Order,
        device: torch.device,
        *,
        no_gradient_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.device, self._no_gradient_hooks = device, no_gradient_hooks
        self._order = order_by_microbatch(order)
        calls = [list(calls_of(stage)) for stage in program.stages]
        most = max((len(call.outputs) for chunk in calls for call, _ in chunk), default=0)
        self._chunks = [[RegionModule(call, held, most) for call, held in chunk] for chunk in calls]
        self._modules = [module for chunk in self._chunks for module in chunk]
        self._module_of = {module.call.index: module for module in self._modules}
        check_microbatches(order)
        for module in self._modules:
            module.call.run = self.run
        number = numbered(self._order)
        self._number = {place: number.get(place, 0) for place in numbered(order)}  # 0: shared by all microbatches
        self._current = 0
        self._static: tuple[tuple[Tensor, ...], ...] = ()
        self._callables: dict[tuple[int, int], Callable[..., Sequence[Tensor]]] = {}

    def capture(self, executor: Executor | None = None, step: Step | None = None) -> None:
        """Capture all graphs of this rank, and free those of an earlier capture. Gradients of a step are lost."""
        self.is_on, self.is_wanted = True, False
        inputs = self.arguments()
        if not inputs.modules:
            return
        check_autocast()
        make = _make_graphed_callables()
        self.release()
        self.is_on = True
        axes = axes_of(value for module in self._modules for value in module.held)
        places = dict(self._places())
        with self._no_gradient_hooks(), uncounted(axes):
            for module in self._modules:
                find_draws(module, inputs.sample_args[places[module.call.index, 0]], self.device)
            with registered(self._modules), _collector_as_found():
                callables = make(inputs.modules, inputs.sample_args, **inputs.named)
        self._static = inputs.sample_args
        self._callables = {key: callables[place] for key, place in places.items()}

    def arguments(self) -> GraphArguments:
        """Return the arguments of ``make_graphed_callables``."""
        return GraphArguments(
            tuple(self._modules),
            sample_args_of(self._order, [[module.call for module in chunk] for chunk in self._chunks], self.device),
            signed_order(self._order),
            [len(chunk) for chunk in self._chunks],
            [module.capture_hooks for module in self._modules],
        )

    def before_forward(self, action: Action) -> None:
        self._current = self._number[action.chunk, action.microbatch]

    def run(self, call: RegionCall, inputs: Sequence[Tensor], held: Sequence[Any]) -> Sequence[Tensor]:
        """Return the outputs of a region for the current microbatch."""
        if not self.is_on or not self._callables or not torch.is_grad_enabled():
            return run_eagerly(call, inputs, held)
        module = self._module_of[call.index]
        self._count(module, FORWARD)
        module.put_generators()
        copying = [_Kept.apply(x) if value.requires_grad else x for x, value in zip(inputs, call.inputs, strict=True)]
        results = module.in_order(self._callables[call.index, self._current](*copying))
        outputs = [y if value.requires_grad else y.detach() for y, value in zip(results, call.outputs, strict=True)]
        node = next((y.grad_fn for y in outputs if y.requires_grad), None)
        if node is not None:
            node.register_prehook(lambda _: self._count(module, BACKWARD))
        return (*outputs, *(inputs[i] for i in call.through))

    def _count(self, module: RegionModule, phase: str) -> None:
        self.num_replays += 1
        module.count(phase)

    @property
    def num_graphs(self) -> int:
        """Two for each captured region and microbatch: a forward and a backward."""
        return 2 * len(self._callables)

    @property
    def static_bytes(self) -> int:
        """Bytes of the static inputs. Outputs and gradients lie in the graphs' own pool."""
        return sum({id(t): t.nbytes for sample in self._static for t in sample}.values())

    def _places(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield ((region, number of its forward), index of its callable)."""
        sizes = [len(chunk) for chunk in self._chunks]
        for (chunk, _), number in numbered(self._order).items():
            for layer, module in enumerate(self._chunks[chunk]):
                yield (module.call.index, number), sample_index(self._order, sizes, chunk, number, layer)

    def release(self) -> None:
        for graphed in self._callables.values():
            graphed.reset()  # pyright: ignore[reportFunctionMemberAccess]
        self._callables, self._static, self.is_on = {}, (), False


class _Kept(torch.autograd.Function):
    """The identity, which copies its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clone()


@contextmanager
def _collector_as_found() -> Iterator[None]:
    """Restore the garbage collector, which Transformer Engine turns off, and leaves off if a capture fails (2.20)."""
    was_on = gc.isenabled()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _make_graphed_callables() -> Callable[..., Sequence[Callable[..., Any]]]:
    """Import Transformer Engine's function. Raises PlanError if it is missing, or lacks one of the arguments."""
    engine = imported("transformer_engine.pytorch", "cuda_graphs.impl", where=WHERE, fix=f"pip install '{EXTRA}'")
    make = engine.make_graphed_callables
    _check_keywords(inspect.signature(make).parameters)
    return make


def _check_keywords(known: Mapping[str, Any]) -> None:
    missing = sorted(GraphArguments((), (), [], [], []).named.keys() - known.keys())
    if missing:
        raise PlanError(
            "this version of Transformer Engine is too old: make_graphed_callables does not accept "
            f"{', '.join(missing)}",
            where=WHERE,
            fix='pip install -U "transformer-engine[pytorch]>=2.19"',
        )


class RegionModule(nn.Module):
    """A region as a module. ``counted``: collectives in a forward and in a backward; ``generators``: of its draws."""

    def __init__(self, call: RegionCall, held: Sequence[Any], num_outputs: int) -> None:
        super().__init__()
        self.call, self.held = call, list(held)
        self._places = sorted(range(len(call.outputs)), key=lambda place: not call.outputs[place].requires_grad)
        self._nothing = (None,) * (num_outputs - len(call.outputs))
        self.axes = axes_of(held)
        self.random = next((value for value in held if isinstance(value, RandomState)), None)
        self.generators: dict[Draw, torch.Generator] = {}
        self.counted: dict[str, Counted] = {}
        self._counting = ExitStack()
        for number, value in enumerate(held):
            if isinstance(value, nn.Parameter):
                self.register_parameter(f"held_{number}", value)
            elif isinstance(value, Tensor):
                self.register_buffer(f"held_{number}", value, persistent=False)

    def forward(self, *inputs: Tensor) -> Sequence[Tensor | None]:
        results = self.call.module(*inputs, *self.held)
        outputs = [
            y if value.requires_grad else y.detach() for y, value in zip(results, self.call.outputs, strict=True)
        ]
        return (*(outputs[place] for place in self._places), *self._nothing)

    def in_order(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Return the region's outputs, from those of the module."""
        return [outputs[self._places.index(place)] for place in range(len(self._places))]

    def put_generators(self) -> None:
        """Set each generator to the first draw of the current microbatch."""
        if self.random is not None:
            self.random.put_all(self.generators)

    @property
    def capture_hooks(self) -> dict[str, dict[int, Callable[[nn.Module], None]]]:
        """Hooks around each forward and backward of the warm-up and of the capture, outside of the graph."""
        return {
            "forward_pre_hooks": {0: self._begin},
            "forward_hooks": {0: lambda _: self._end(FORWARD)},
            "backward_pre_hooks": {0: self._begin},
            "backward_hooks": {0: lambda _: self._end(BACKWARD)},
        }

    def count(self, phase: str) -> None:
        """Count the collectives of one more forward, or backward."""
        count_again(self.counted.get(phase, []))

    def _begin(self, _: nn.Module) -> None:
        self._now = self._counting.enter_context(uncounted(self.axes))

    def _end(self, phase: str) -> None:
        self._counting.close()
        self.counted[phase] = self._now


def find_draws(module: RegionModule, inputs: Sequence[Tensor], device: torch.device) -> None:
    """Give a region a generator for each of its draws, shared by all microbatches."""
    random = module.random
    if random is None:
        return
    random.begin(0, 0)
    with random.watched() as drawn, torch.no_grad():
        module(*inputs)
    module.generators = {draw: torch.Generator(device) for draw in drawn}


@contextmanager
def registered(modules: Sequence[RegionModule]) -> Iterator[None]:
    """Register the generators of these regions with graphs that are captured meanwhile, beside existing ones."""
    generators = {draw: generator for module in modules for draw, generator in module.generators.items()}
    if not generators:
        yield
        return
    distributed = importlib.import_module(DISTRIBUTED)
    tracker, before = distributed.CudaRNGStatesTracker(), distributed.get_all_rng_states()
    tracker.set_states({**before, **{f"meshwright {draw}": generator for draw, generator in generators.items()}})
    try:
        with installed(*((module.random, "registered", generators) for module in modules if module.random is not None)):
            yield
    finally:
        tracker.set_states(before)
