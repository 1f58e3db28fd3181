"""Programs of layers of experts, captured and rewritten, run in one process for all ranks of ep at once.

    difference(captured, opened, values, ep)      of outputs and gradients, as a part of their own size

A value is one for all ranks, but for those of a rank's own experts:

    own_member(w_0, w_1)       Apart(w_0, w_1)                  the weights that each rank has
    part(rows, here, e)        Apart(rows of e, of e + E/ep)    so are slots_of, and slices of stacks
    join(parts)                one value again, of the parts of all ranks

The calls between are run for each rank. Dropout is a function of its input here, so that it is the same in both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import WITH_SIZES, is_grouped
from passes.program.program import Program
from planner.capture.graphs_equal import InFloat64, widened
from planner.captured import prepare
from planner.spec.spec import Spec
from tests.models import experts, routers, selected_rows, sliced_experts, slots, sorted_experts, stacked_experts
from tests.tools.captures import captured_again
from tests.tools.simulated_mesh import spec_of


@dataclass(frozen=True)
class Apart:
    """``of``: the value of each rank of ep."""

    of: tuple[Any, ...]


class OverRanks(InFloat64):
    """Runs a graph for ``ep`` ranks, in float64 or ``as_written``."""

    def __init__(self, program: Program, ep: int = 1, *, as_written: bool = False) -> None:
        super().__init__(program.graph)
        self.ep, self.run_as = ep, fx.Interpreter if as_written else InFloat64

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.run_as.placeholder(self, target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        args: Any = self.fetch_args_kwargs_from_env(n)[0] if n.op == "call_function" else ()
        domain, read = domain_of(n), n.all_input_nodes
        if n.target is aten.slice.Tensor and (of := domain_of(read[0])) is not None and of.experts == args[1]:
            stack, dim, start, stop = args  # each rank takes a slice of its own
            return self._each(lambda r: stack.narrow(dim, start + r * self._here(stack, dim), stop - start))
        if n.target in WITH_SIZES and domain is not None and domain.rows >= 0:  # the graph has the average there
            sizes = [-1 if dim == domain.rows else size for dim, size in enumerate(args[1])]
            return self.call_function(n.target, (args[0], sizes, *args[2:]), n.kwargs)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is exchange.own_member:
            return Apart(args)
        if target is exchange.part:
            rows, here, number = args
            return self._each(lambda r: rows.split(here.tolist())[number + r * self._here(here, 0)])
        if target is exchange.slots_of:
            slots, dim, number, keepdim = args
            return self._each(lambda r: target(slots, dim, number + r * self._here(slots, dim), keepdim))
        if target is exchange.join:
            return target(*(part.of[r] for r in range(self.ep) for part in map(self._apart, args)), **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Apart) for leaf in leaves):
            return self._called(target, args, kwargs)
        of_ranks = [tree_unflatten([self._apart(leaf).of[r] for leaf in leaves], form) for r in range(self.ep)]
        return self._each(lambda r: self._called(target, *of_ranks[r]))

    def _called(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.dropout.default, exchange.drop_rows):
            return args[0] * (1 - args[1] * args[0].cos())
        if is_grouped(target) and target is not exchange.grouped_mm:  # kernels know few dtypes
            rows, stack, ends = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            bounds = [0, *ends.tolist()]
            return torch.cat([rows[a:b] @ w for a, b, w in zip(bounds, bounds[1:], stack, strict=False)])
        return self.run_as.call_function(self, target, args, kwargs)

    def _each(self, of_rank: Callable[[int], Any]) -> Apart:
        return Apart(tuple(map(of_rank, range(self.ep))))

    def _apart(self, value: Any) -> Apart:
        return value if isinstance(value, Apart) else Apart((value,) * self.ep)

    def _here(self, value: Tensor, dim: int) -> int:
        """The experts of one rank."""
        return value.shape[dim] // self.ep


def drawn_values(program: Program, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0) -> dict[str, Any]:
    """Placeholder → its value: parameters near the model's own, of which none is zero; its buffers, and the batch."""
    generator, values = torch.Generator().manual_seed(seed), dict[str, Any]()
    for name, fqn in program.parameters.items():
        own = model.get_parameter(fqn)
        noise = torch.randn(own.shape, generator=generator, dtype=torch.float64) * 0.1
        values[name] = (own.detach().double() + noise).requires_grad_(own.requires_grad)
    values |= {name: widened(model.get_buffer(fqn)) for name, fqn in program.buffers.items()}
    values |= program.constants
    values |= {name: widened(batch[key]) for name, key in program.inputs.items()}
    holders = program.graph.graph.find_nodes(op="placeholder")
    return {n.name: torch.ones(shape_of(n), dtype=torch.float64) for n in holders} | values  # counts of labels


def results(
    program: Program, values: Mapping[str, Any], ep: int = 1, *, as_written: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Of each output and parameter: (name, value or gradient)."""
    holders = program.graph.graph.find_nodes(op="placeholder")
    if as_written:
        values = {n.name: _as_in(n.meta["val"], values[n.name]) for n in holders}
    torch.manual_seed(0)  # routers may draw
    outputs = OverRanks(program, ep, as_written=as_written).run(*(values[n.name] for n in holders))
    nodes: Any = program.graph.graph.output_node().args[0]
    loss = outputs[[node.name for node in nodes].index(program.loss)]
    trained = {name: values[name] for name in program.parameters if values[name].requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    yield from ((f"output {n}", x.detach()) for n, x in enumerate(outputs) if isinstance(x, Tensor))
    for (name, value), found in zip(trained.items(), gradients, strict=True):
        yield name, torch.zeros_like(value) if found is None else found


def _as_in(meta: Any, value: Any) -> Any:
    """In the dtype of the graph."""
    if not isinstance(meta, Tensor) or not isinstance(value, Tensor):
        return value
    return value.detach().to(meta.dtype).requires_grad_(value.requires_grad)


def difference(captured: Program, opened: Program, values: Mapping[str, Any], ep: int = 1) -> tuple[float, str]:
    """The largest, and of which output or parameter."""
    return apart(captured, dict(results(captured, values)), dict(results(opened, values, ep)))


def apart(program: Program, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, str]:
    """The same of two results."""
    assert wanted.keys() == found.keys()
    norm = torch.stack([x.double().norm() for name, x in wanted.items() if name in program.parameters]).norm()
    most = (0.0, "nothing")
    for name, x in wanted.items():
        if x.is_floating_point():
            whole = norm if name in program.parameters else 1 + x.norm()
            part = float((found[name].double() - x).norm() / whole)
            most = max(most, (part if part == part else torch.inf, name))
    return most


Make = Callable[[], nn.Module]


def of(layer: Callable[..., nn.Module], ways: Iterable[Callable[..., Any]]) -> dict[str, Make]:
    """Layers by name."""
    return {f"{layer.__name__}.{way.__name__}": partial(layer, way) for way in ways}


LOOPS = (
    selected_rows.index_add,
    selected_rows.one_hot,
    selected_rows.compared_with_all,
    selected_rows.some_choice,
    selected_rows.columns,
    selected_rows.every_copy,
    selected_rows.weighted_before,
    selected_rows.divided,
    selected_rows.of_batches,
    selected_rows.pairs_of_batches,
    selected_rows.beside_shared,
    selected_rows.weighted_by_another,
)
FILLED = (
    slots.one_hot,
    slots.scattered,
    slots.expert_choice,
    slots.by_sequence,
    slots.unbound,
    slots.chunks,
    slots.as_deepspeed,
    slots.experts_first,
)
SPELLINGS = {
    **of(experts.Layer, (*experts.LOOPS, experts.copied, experts.looked_up)),
    **of(selected_rows.Selecting, LOOPS),
    **of(sliced_experts.Sliced, (sliced_experts.with_biases, sliced_experts.unbound)),
    **of(stacked_experts.Stacks, stacked_experts.WAYS),
    **of(sorted_experts.Sorting, sorted_experts.WAYS),
    **of(slots.Slots, FILLED),
    **{
        f"{rank.__name__}.{way.__name__}": partial(routers.Ranking, rank, way)
        for rank in routers.RANKS
        for way in (experts.masks, experts.stacked, experts.looked_up)
    },
}
OPENINGS = ("Layer.masks", "Stacks.biased", "Stacks.of_pairs", "Sorting.by_places", "Slots.one_hot", "Slots.unbound")


def captured(make: Make, batch: Mapping[str, Tensor] | None = None, **more: Any) -> tuple[Program, dict[str, Any]]:
    """A program before anything is decided about experts, and values of its placeholders."""
    torch.manual_seed(3)
    batch = experts.batch() if batch is None else batch
    model, spec = make(), Spec.load(spec_of(dict(batch), {}, **more))
    program = prepare(captured_again(model, spec), spec).program
    return program, drawn_values(program, model, batch)
