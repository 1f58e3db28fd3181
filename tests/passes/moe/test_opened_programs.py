"""A program with the exchange of its experts computes what the captured one does, in each spelling and on each mesh.

Both run in one process, in float64, so that each layer is held without ranks; tests/numeric runs ranks.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from passes.moe import exchange
from passes.moe.find import find_experts
from passes.moe.open import open_experts
from passes.program.ops.aten import aten
from passes.program.program import Program, copied
from planner.mesh import Mesh
from tests.models import experts, selected_rows
from tests.models.drawn_experts import DrawnNet
from tests.tools.captures import program_again
from tests.tools.expert_programs import OPENINGS, SPELLINGS, captured, difference

NEAR = 1e-11
MESHES = {  # (mesh, nodes that ep extends over)
    "ep 2": (Mesh(dp=2, ep=2), 1),
    "ep 2 on 2 nodes": (Mesh(dp=2, ep=2), 2),
    "etp 1": (Mesh(tp=2, etp=1), 1),
}


OTHERS = [name for name in SPELLINGS if name not in OPENINGS]


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
        assert {node.target for node in made.graph.graph.nodes} & set(exchange.EXCHANGES), title
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


def test_no_call_of_a_branch_is_run_to_learn_its_shape() -> None:
    graph, counted = opened_layer(experts.Layer(experts.masks))
    assert len(graph.find_nodes(op="call_function", target=aten.gelu.default)) == 2  # of four, over ep 2
    assert counted.ran[aten.gelu.default] == 0


@pytest.mark.thorough
def test_the_expert_of_each_row_is_looked_up_once_for_all_gates() -> None:
    graph, _ = opened_layer(selected_rows.Selecting(selected_rows.columns))
    (counts,) = graph.find_nodes(op="call_function", target=exchange.count_experts)
    flat = {user for chosen in counts.all_input_nodes for user in chosen.users if user.target is aten.reshape.default}
    assert [user.target for n in flat for user in n.users if user.target is aten.index.Tensor] == [aten.index.Tensor]
