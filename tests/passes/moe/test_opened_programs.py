"""A program with the exchange of its experts computes what the captured one does, by each opening and on each mesh.

Both run in one process, in float64, so that each layer is held without ranks; tests/numeric runs ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

from passes.moe import exchange
from passes.moe.find import find_experts
from passes.moe.open import open_experts
from passes.program.program import Program, copied
from planner.captured import prepare
from planner.mesh import Mesh
from planner.spec.spec import Spec
from tests.models import experts, slots, sorted_experts, stacked_experts
from tests.tools.captures import captured_again
from tests.tools.opened_programs import difference, drawn_values
from tests.tools.simulated_mesh import spec_of

MESHES = {  # (mesh, nodes that ep extends over)
    "alone": (Mesh(), 1),
    "ep 2": (Mesh(dp=2, ep=2), 1),
    "ep 2 on 2 nodes": (Mesh(dp=2, ep=2), 2),
    "etp 1": (Mesh(tp=2, etp=1), 1),
}
NEAR = 1e-11
OPENINGS: dict[str, Callable[[], nn.Module]] = {
    "loop": partial(experts.Layer, experts.masks),
    "stacks": partial(stacked_experts.Stacks, stacked_experts.biased),
    "looked up": partial(stacked_experts.Stacks, stacked_experts.of_pairs),
    "sorted": partial(sorted_experts.Sorting, sorted_experts.by_places),
    "slots": partial(slots.Slots, slots.one_hot),
    "slots of modules": partial(slots.Slots, slots.unbound),
}


def captured(name: str) -> tuple[Program, dict[str, Any]]:
    """A program before anything is decided about experts, and values of its placeholders."""
    torch.manual_seed(3)
    model, spec = experts.Net(OPENINGS[name]()), Spec.load(spec_of(experts.batch(), {}))
    program = prepare(captured_again(model, spec), spec).program
    return program, drawn_values(program, model, experts.batch())


def opened(program: Program, mesh: Mesh, nodes: int = 1) -> Program:
    made = copied(program)
    open_experts(made, find_experts(made), mesh, nodes=nodes)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPENINGS)
def test_no_mesh_changes_outputs_or_gradients(name: str) -> None:
    program, values = captured(name)
    for title, (mesh, nodes) in MESHES.items():
        made = opened(program, mesh, nodes)
        calls = {node.target for node in made.graph.graph.nodes}
        assert title == "alone" or calls & set(exchange.EXCHANGES), title
        most, where = difference(program, made, values, mesh.ep)
        assert most < NEAR, f"{title}: {where} is {most:.1e} away"


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
    program, values = captured("loop")
    made, ep = opened(program, FAULTS[fault]), FAULTS[fault].ep
    fault(made.graph.graph)
    assert difference(program, made, values, ep)[0] > 1e-3
