"""Where something is zero because something else is, and where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.moe.rows import stays_zero

KEEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "factor": lambda g, y: y * g,
    "product": lambda g, y: g @ y,
    "silu": lambda g, y: F.silu(g),
    "gated": lambda g, y: F.silu(g) * (g + g),
    "mask": lambda g, y: torch.where(g > 0, y, 0),
    "sum": lambda g, y: g.sum(1),
}
BREAKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bias": lambda g, y: g + y,
    "sigmoid": lambda g, y: g.sigmoid() * 2,
    "divisor": lambda g, y: y / (g + 1),
    "softmax": lambda g, y: g.softmax(-1),
    "other branch": lambda g, y: torch.where(g > 0, 0, y),
    "joined": lambda g, y: torch.cat([g, y]),
}


def zero_at_the_end(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    given = torch.rand(4, 4) + 1, torch.rand(4, 4) + 1
    program = torch.export.export(_Module(function), given).run_decompositions({})
    graph, names = program.graph, [n for n in program.graph.nodes if n.op == "placeholder"]
    zero = {names[0]}
    for node in graph.nodes:
        if node.op == "call_function" and stays_zero(node, zero):
            zero.add(node)
    (output,) = graph.find_nodes(op="output")
    return isinstance(output.args[0][0], fx.Node) and output.args[0][0] in zero


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, g: Tensor, y: Tensor) -> Tensor:
        return self.function(g, y)


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_zero_with_its_gate(name):
    assert zero_at_the_end(KEEPS[name])


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_not(name):
    assert not zero_at_the_end(BREAKS[name])
