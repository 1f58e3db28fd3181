"""A program with the exchange of its experts computes what the captured one does, in each spelling and on each mesh.

Both run in one process, in float64, so that each layer is held without ranks; tests/numeric runs ranks.

    difference(captured, opened, values, ep)      of outputs and gradients, as a part of their own size

All ranks of ep run at once. A value is one for all of them, but for those of a rank's own experts:

    own_member(w_0, w_1)       Apart(w_0, w_1)                  the weights that each rank has
    part(rows, here, e)        Apart(rows of e, of e + E/ep)    so are slots_of, and slices of stacks
    join(parts)                one value again, of the parts of all ranks

The calls between are run for each rank. Dropout is a function of its input here, so that it is the same in both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.moe.find import find_experts
from passes.moe.open import open_experts
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import WITH_SIZES, is_grouped
from passes.program.program import Program, copied
from planner.capture.graphs_equal import InFloat64, widened
from planner.captured import prepare
from planner.mesh import Mesh
from planner.spec.spec import Spec
from tests.models import experts, selected_rows, sliced_experts, slots, sorted_experts, stacked_experts
from tests.models.drawn_experts import DrawnNet
from tests.tools.captures import captured_again, program_again
from tests.tools.simulated_mesh import spec_of


@dataclass(frozen=True)
class Apart:
    """``of``: the value of each rank of ep."""

    of: tuple[Any, ...]


class OverRanks(InFloat64):
    """Runs a graph for ``ep`` ranks."""

    def __init__(self, program: Program, ep: int = 1) -> None:
        super().__init__(program.graph)
        self.ep = ep

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
        return super().call_function(target, args, kwargs)

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


def results(program: Program, values: Mapping[str, Any], ep: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Of each output and parameter: (name, value or gradient)."""
    given = [values[node.name] for node in program.graph.graph.find_nodes(op="placeholder")]
    outputs = OverRanks(program, ep).run(*given)
    nodes: Any = program.graph.graph.output_node().args[0]
    loss = outputs[[node.name for node in nodes].index(program.loss)]
    trained = {name: values[name] for name in program.parameters if values[name].requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    yield from ((f"output {n}", x.detach()) for n, x in enumerate(outputs) if isinstance(x, Tensor))
    for (name, value), found in zip(trained.items(), gradients, strict=True):
        yield name, torch.zeros_like(value) if found is None else found


def difference(captured: Program, opened: Program, values: Mapping[str, Any], ep: int = 1) -> tuple[float, str]:
    """The largest, and of which output or parameter."""
    wanted, found = dict(results(captured, values)), dict(results(opened, values, ep))
    assert wanted.keys() == found.keys()
    norm = torch.stack([x.norm() for name, x in wanted.items() if name in captured.parameters]).norm()
    most = (0.0, "nothing")
    for name, x in wanted.items():
        if x.is_floating_point():
            whole = norm if name in captured.parameters else 1 + x.norm()
            part = float((found[name] - x).norm() / whole)
            most = max(most, (part if part == part else torch.inf, name))
    return most


MESHES = {  # (mesh, nodes that ep extends over)
    "alone": (Mesh(), 1),
    "ep 2": (Mesh(dp=2, ep=2), 1),
    "ep 2 on 2 nodes": (Mesh(dp=2, ep=2), 2),
    "etp 1": (Mesh(tp=2, etp=1), 1),
}
NEAR = 1e-11
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
}
OPENINGS = ("Layer.masks", "Stacks.biased", "Stacks.of_pairs", "Sorting.by_places", "Slots.one_hot", "Slots.unbound")
OTHERS = [name for name in SPELLINGS if name not in OPENINGS]


def captured(make: Make, **more: Any) -> tuple[Program, dict[str, Any]]:
    """A program before anything is decided about experts, and values of its placeholders."""
    torch.manual_seed(3)
    model, spec = make(), Spec.load(spec_of(experts.batch(), {}, **more))
    program = prepare(captured_again(model, spec), spec).program
    return program, drawn_values(program, model, experts.batch())


def opened(program: Program, mesh: Mesh, nodes: int = 1) -> Program:
    made = copied(program)
    open_experts(made, find_experts(made), mesh, nodes=nodes)
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OPENINGS, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_no_mesh_changes_outputs_or_gradients(name: str) -> None:
    check(*captured(lambda: experts.Net(SPELLINGS[name]())))


def check(program: Program, values: Mapping[str, Any]) -> None:
    for title, (mesh, nodes) in MESHES.items():
        made = opened(program, mesh, nodes)
        calls = {node.target for node in made.graph.graph.nodes}
        assert title == "alone" or calls & set(exchange.EXCHANGES), title
        most, where = difference(program, made, values, mesh.ep)
        assert most < NEAR, f"{title}: {where} is {most:.1e} away"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(100))
def test_five_drawn_layers(seed: int) -> None:
    check(*captured(lambda: DrawnNet(seed).double()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPENINGS)
def test_rows_of_each_dtype_are_those_of_float64(name: str, dtype: str) -> None:
    """The graph is that of the dtype; its ops compute in float64."""
    check(*captured(lambda: experts.Net(SPELLINGS[name]()), precision={"parameters": dtype}))


# ---- a wrong exchange is seen


def weights_of_another_rank(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=exchange.own_member):
        node.args = node.args[::-1]


def rows_of_another_expert(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=exchange.part):
        rows, here, number = node.args
        node.args = (rows, here, 1 - number)  # pyright: ignore[reportOperatorIssue]


def rows_left_in_their_order(graph: fx.Graph) -> None:
    """Given back, and not put in the order of the pairs."""
    for node in graph.find_nodes(op="call_function", target=exchange.give_back):
        for user in list(node.users):
            user.replace_all_uses_with(node)


FAULTS = {
    weights_of_another_rank: Mesh(dp=2, ep=2),
    rows_of_another_expert: Mesh(dp=2, ep=2),
    rows_left_in_their_order: Mesh(tp=2, etp=1),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_wrong_exchange_is_seen(fault: Callable[[fx.Graph], None]) -> None:
    program, values = captured(lambda: experts.Net(SPELLINGS["Layer.masks"]()))
    made, ep = opened(program, FAULTS[fault]), FAULTS[fault].ep
    fault(made.graph.graph)
    assert difference(program, made, values, ep)[0] > 1e-3


# ---- a loop over experts is opened with as little work as its experts have in common


class Meta(TorchDispatchMode):
    """Counts the ops that are run on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func] += any(isinstance(x, Tensor) and x.is_meta for x in args)
        return func(*args, **(kwargs or {}))


def opened_layer(layer: Any) -> tuple[fx.Graph, Meta]:
    torch.manual_seed(3)
    program = program_again(experts.Net(layer), experts.batch())
    found = find_experts(program)
    with Meta() as counted:
        open_experts(program, found, Mesh(dp=2, ep=2))
    return program.graph.graph, counted


def test_the_shapes_of_a_branch_are_those_of_the_others() -> None:
    graph, counted = opened_layer(experts.Layer(experts.masks))
    assert len(graph.find_nodes(op="call_function", target=aten.gelu.default)) == 2  # of four, over ep 2
    assert counted.ran[aten.gelu.default] == 1


@pytest.mark.thorough
def test_the_expert_of_each_row_is_looked_up_once_for_all_gates() -> None:
    graph, _ = opened_layer(selected_rows.Selecting(selected_rows.columns))
    (counts,) = graph.find_nodes(op="call_function", target=exchange.count_experts)
    flat = {user for chosen in counts.all_input_nodes for user in chosen.users if user.target is aten.reshape.default}
    assert [user.target for n in flat for user in n.users if user.target is aten.index.Tensor] == [aten.index.Tensor]
