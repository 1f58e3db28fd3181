"""The two graphs of one region in one slot, and the static memory between them and the eager ops around.

    forward     inputs → copied into static inputs → [ region → static outputs ]
    backward    gradients → copied into static gradients → [ region's backward → static gradients, weights' += ]

[ ] is captured. Products add the gradients of their weights into the buffers, as eager ones do. The graph adds the
gradient of any other weight that only this region reads; gradients of shared weights are outputs, which autograd sums
in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from passes.ops.random_state import Draw, RandomState
from passes.ops.region import RegionCall
from passes.ops.weight_gradients import AtOnce
from passes.program.stages import BoundaryPlan
from runtime.cuda_graphs.calls import Counted, axes_of, count_again, uncounted
from runtime.cuda_graphs.graphs import Graph, Maker
from runtime.optimizer.places import add_product, add_products, add_rows, add_whole


class Region:
    """Inputs for the graphs of a region: its call, and its ``held`` values.

    ``own``: the weights that it alone reads. Owns: the generators that its draws are from, put before each replay.
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

    @contextmanager
    def drawing_again(self, step: int, microbatch: int) -> Iterator[None]:
        """Inside, a replayed backward repeats the draws of its microbatch's forward."""
        with self.random.again(step, microbatch):
            self.random.put_all({draw: generator for draw, generator in self.generators.items() if draw.again})
            yield


class RegionGraphs:
    """The graphs of one region for one microbatch at a time. Owns: their static memory."""

    def __init__(self, region: Region, maker: Maker, device: torch.device) -> None:
        call = region.call
        self.region, self._maker = region, maker
        self.inputs, self.outputs = _zeros(call.inputs, device), _zeros(call.outputs, device)
        self.of_inputs = _zeros((b for b in call.inputs if b.requires_grad), device)
        self.of_outputs = _zeros((b for b in call.outputs if b.requires_grad), device)
        self.of_later = _zeros((call.inputs[i] for i in call.through), device)
        maker.spoil(self._static)
        self.of_shared: list[Tensor | None] = []
        self.added: list[nn.Parameter] = []  # as often as the backward adds to the gradient of each
        self._forward: tuple[Graph, Counted] | None = None
        self._backward: tuple[Graph, Counted] | None = None
        self._drawn = (0, 0)  # step and microbatch of the forward that ran last

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._static)

    @property
    def _static(self) -> list[Tensor]:
        return [*self.inputs, *self.outputs, *self.of_inputs, *self.of_outputs, *self.of_later]

    # ---- the capture

    def warm_up(self) -> None:
        """Run forward and backward once, and note the draws."""
        random, device = self.region.random, self._static[0].device

        def body() -> None:
            self._run()
            self._run_backward()

        with uncounted(self.region.axes), random.watched() as drawn:
            self._maker.warm_up(body)
        self.region.generators = {draw: torch.Generator(device) for draw in drawn}

    def capture_forward(self, pool: Any) -> None:
        self._forward = self._captured(pool, self._run)

    def capture_backward(self, pool: Any) -> None:
        if self.region.has_backward:
            self._backward = self._captured(pool, self._run_backward)

    def _captured(self, pool: Any, body: Callable[[], None]) -> tuple[Graph, Counted]:
        region = self.region
        graph = self._maker.graph(pool, region.generators.values())
        region.put_generators()
        with region.random.drawing_by(region.generators, is_part=True), uncounted(region.axes) as counted:
            graph.capture(body)
        return graph, counted

    def _run(self) -> None:
        """The region, from its static inputs to its static outputs."""
        call = self.region.call
        with torch.enable_grad():
            # other leaves than the parameters: theirs are bound to the stream of the eager steps, and have hooks
            leaves = [_leaf(s, b.requires_grad) for s, b in zip(self.inputs, call.inputs, strict=True)]
            held = {id(v): _leaf(v, v.requires_grad) for v in self.region.held if isinstance(v, nn.Parameter)}
            with self._adding({id(leaf): self.region.trained[key] for key, leaf in held.items() if leaf.requires_grad}):
                made = call.module(*leaves, *(held.get(id(value), value) for value in self.region.held))
            through = [leaves[i].view_as(leaves[i]) for i in call.through]  # made last: its gradient comes first
        with torch.no_grad():
            copy_in(self.outputs, made)
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._weights = [held[id(weight)] for weight in (*self.region.own, *self.region.shared)]
        made = [value for value, b in zip(made, call.outputs, strict=True) if b.requires_grad]
        self._edges = [get_gradient_edge(v) if v.requires_grad else None for v in (*made, *through)]

    def _adding(self, parameter_of: dict[int, nn.Parameter]) -> AbstractContextManager[None]:
        """Products of meanwhile add to the buffers themselves; ``parameter_of``: by the id of its leaf here."""
        handle = self.region.handle
        return nullcontext() if handle is None else handle.bound_to(_Places(parameter_of, self.added))

    def _run_backward(self) -> None:
        statics, leaves = (*self.of_outputs, *self.of_later), [*self._leaves, *self._weights]
        seeds = [(edge, static) for edge, static in zip(self._edges, statics, strict=True) if edge is not None]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        self.added.clear()
        if seeds and leaves:
            edges, gradients = zip(*seeds, strict=True)
            found = torch.autograd.grad(edges, leaves, gradients, allow_unused=True)
        of_weights = found[len(self._leaves) :]
        with torch.no_grad():
            for static, gradient in zip(self.of_inputs, found, strict=False):
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

    def forward(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, and the inputs that pass through."""
        copy_in(self.inputs, given)
        self.region.put_generators()
        self._drawn = self.region.random.step, self.region.random.microbatch
        self._replay(self._forward)
        return [*(static.detach() for static in self.outputs), *(given[i].detach() for i in self.region.call.through)]

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of inputs and shared weights, from those of the outputs and of the inputs that pass through."""
        for static, given in zip((*self.of_outputs, *self.of_later), gradients, strict=True):
            static.zero_() if given is None else static.copy_(given)
        with self.region.drawing_again(*self._drawn):
            self._replay(self._backward)
        # whoever keeps them (a send, a leaf) must not see the next replay
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
    """The gradient memory to which a captured region adds: it always adds, since one graph serves every microbatch."""

    def __init__(self, parameter_of: dict[int, nn.Parameter], added: list[nn.Parameter]) -> None:
        self._parameter_of, self._added = parameter_of, added

    def place_of(self, parameter: Tensor) -> _Place | None:
        found = self._parameter_of.get(id(parameter))
        return None if found is None else _Place(found, self._added)


class _Place:
    def __init__(self, parameter: nn.Parameter, added: list[nn.Parameter]) -> None:
        self._parameter, self._added = parameter, added

    def add_product(self, left: Tensor, right: Tensor) -> None:
        add_product(self._parameter.main_grad, left, right, is_fresh=False)  # pyright: ignore
        self._added.append(self._parameter)

    def add_products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
        add_products(self._parameter.main_grad, lefts, rights, is_fresh=False)  # pyright: ignore
        self._added.append(self._parameter)

    def add_whole(self, gradient: Tensor) -> None:
        add_whole(self._parameter.main_grad, gradient, is_fresh=False)  # pyright: ignore
        self._added.append(self._parameter)

    def add_rows(self, rows: Tensor) -> None:
        add_rows(self._parameter.main_grad, rows, is_fresh=False)  # pyright: ignore
        self._added.append(self._parameter)

    def add_nothing(self) -> None:
        self._added.append(self._parameter)


def copy_in(statics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for static, value in zip(statics, values, strict=True):
        static.copy_(value)


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def _zeros(values: Iterable[BoundaryPlan], device: torch.device) -> list[Tensor]:
    return [torch.zeros(b.shape, dtype=getattr(torch, b.dtype), device=device) for b in values]
