"""Dims of rows that calls keep or mix; where something is zero because something else is, and where it is not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.program.walks import readers, walk
from passes.rules.follow import follow, stays_zero

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


ALONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: F.gelu(x @ w),
    "transposed": lambda x, w: (w.t() @ x.t()).t() + x,
    "norm": lambda x, w: F.layer_norm(x, (4,)) * w[0],
}
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, w: x.softmax(0) @ w,
    "sum": lambda x, w: x.sum(0) + w,
    "left factor": lambda x, w: w @ x,
    "twice": lambda x, w: x @ x.t(),
}


def captured(function: Callable[[Tensor, Tensor], Tensor], rows: int = 4) -> fx.Graph:
    given = torch.rand(rows, 4) + 1, torch.rand(4, 4) + 1
    return torch.export.export(_Module(function), given).run_decompositions({}).graph


def dim_at_the_end(function: Callable[[Tensor, Tensor], Tensor], rows: int = 4) -> int:
    """Of the rows of the first argument."""
    graph = captured(function, rows)
    first = next(iter(graph.nodes))
    calls = set(walk([first], readers, into=lambda n: n.op != "output")) - {first}
    known = follow({first: 0}, calls, lambda node, why: ValueError(f"{node}: {why}"), "rows are mixed", every=True)
    return known[graph.output_node().args[0][0]]  # pyright: ignore


def zero_at_the_end(function: Callable[[Tensor, Tensor], Tensor]) -> bool:
    graph = captured(function)
    zero = {next(iter(graph.nodes))}
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


@pytest.mark.parametrize("name", ALONE)
def test_rows_stay_first_where_each_is_computed_alone(name):
    assert dim_at_the_end(ALONE[name]) == 0


def test_one_row_is_followed_by_its_factor():
    assert dim_at_the_end(ALONE["product"], rows=1) == 0


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_depend_on_others_are_refused(name):
    with pytest.raises(ValueError, match=r"rows are mixed|count the same"):
        dim_at_the_end(MIXED[name])
