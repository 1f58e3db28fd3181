"""A loop over experts is opened with as little work as its experts have in common."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from passes.moe import exchange
from passes.moe.find import find_experts
from passes.moe.open import open_experts
from passes.program.ops.aten import aten
from planner.mesh import Mesh
from tests.models import experts, selected_rows
from tests.tools.captures import program_again


class Meta(TorchDispatchMode):
    """Counts the ops that are run on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func] += any(isinstance(x, Tensor) and x.is_meta for x in args)
        return func(*args, **(kwargs or {}))


def opened(layer: Any) -> tuple[fx.Graph, Meta]:
    torch.manual_seed(3)
    program = program_again(experts.Net(layer), experts.batch())
    found = find_experts(program)
    with Meta() as counted:
        open_experts(program, found, Mesh(dp=2, ep=2))
    return program.graph.graph, counted


def test_the_shapes_of_a_branch_are_those_of_the_others() -> None:
    graph, counted = opened(experts.Layer(experts.masks))
    assert len(graph.find_nodes(op="call_function", target=aten.gelu.default)) == 2  # of four, over ep 2
    assert counted.ran[aten.gelu.default] == 1


@pytest.mark.thorough
def test_the_expert_of_each_row_is_looked_up_once_for_all_gates() -> None:
    graph, _ = opened(selected_rows.Selecting(selected_rows.columns))
    (counts,) = graph.find_nodes(op="call_function", target=exchange.count_experts)
    flat = {user for chosen in counts.all_input_nodes for user in chosen.users if user.target is aten.reshape.default}
    assert [user.target for n in flat for user in n.users if user.target is aten.index.Tensor] == [aten.index.Tensor]
