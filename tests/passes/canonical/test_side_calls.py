"""Tables that a loop over kinds makes stand in one order; a branch on a draw is captured where it cannot change it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.canonical.side_calls import order_side_calls
from passes.errors import PlanError
from passes.program.program import Program
from passes.program.source_lines import lines_of
from planner.capture.export import capture

KINDS = ("full", "sliding", "chunked")


class Kinds(nn.Module):
    """Of each kind a table by position and a mask; ``walked``: the order in which the loop takes them."""

    def __init__(self, walked: tuple[str, ...]) -> None:
        super().__init__()
        self.walked, self.linear = walked, nn.Linear(4, 4)
        for i, kind in enumerate(KINDS):
            self.register_buffer(kind, torch.arange(4.0) + i)

    def table(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(-1) * getattr(self, kind)
        return angles.cos(), angles.sin() * 2

    def mask(self, positions: Tensor, kind: str) -> Tensor:
        away = positions[:, None] - positions[None]
        if kind == "full":
            return away >= 0
        return (away >= 0) & (away < 3) if kind == "sliding" else (away // 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        tables, masks = {}, {}
        for kind in self.walked:
            tables[kind], masks[kind] = self.table(positions, kind), self.mask(positions, kind)
        x = self.linear(x)
        for kind in KINDS:
            cos, sin = tables[kind]
            x = torch.einsum("ij,bjd->bid", masks[kind].to(x.dtype), x * cos + x.flip(-1) * sin)
        return x.square().mean()


def captured(*walked: str):
    torch.manual_seed(0)
    return capture(Kinds(walked), {"x": torch.ones(2, 6, 4)})


@pytest.mark.thorough
def test_a_captured_graph_does_not_depend_on_the_order_of_a_loop_over_kinds():
    graphs = {str(captured(*walked).graph.graph) for walked in (KINDS, KINDS[::-1], ("chunked", "full", "sliding"))}
    assert len(graphs) == 1


def test_straight_code_stays_as_it_was_traced():
    graph = captured(*KINDS).graph.graph
    made = [node for node in graph.nodes if node.op == "call_function" and not node.meta["grad"]]
    assert [lines_of(node) for node in made] == sorted(lines_of(node) for node in made)
    before = str(graph)
    order_side_calls(graph, ["p_linear_weight", "p_linear_bias"])
    assert str(graph) == before


def test_calls_that_read_weights_and_draws_stay_in_their_places():
    class Drawing(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return (x * w + noise * 2 + torch.ones(4) * 3).sum()

    graph = torch.fx.symbolic_trace(Drawing()).graph
    names = [node.name for node in graph.nodes]
    order_side_calls(graph, ["w"])
    assert [node.name for node in graph.nodes] == names


# ---- a branch on a random draw is captured where the draw cannot change it


class LayerDrop(nn.Module):
    """Two layers, each skipped where ``skips`` says so, and a head."""

    def __init__(self, skips: Callable[[], bool | Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.skips():
                continue
            x = layer(x)
        return self.head(x).sum()


def with_skips(skips: Callable[[], bool | Tensor]) -> Program:
    return capture(LayerDrop(skips), {"x": torch.ones(2, 4)})


def num_layers(program: Program) -> int:
    return sum(n.target is torch.ops.aten.linear.default for n in program.graph.graph.nodes) - 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "skips",
    [
        lambda: torch.rand([]) < 0.0,
        lambda: torch.rand(1) < 0,
        lambda: torch.empty(1, 1).uniform_() < 0.0,
        lambda: torch.rand([]) >= 1.0,
        lambda: not torch.rand([]) < 1.0,
        lambda: not torch.rand_like(torch.ones([])) >= 0.0,
        lambda: torch.rand([]) <= -1,
    ],
)
def test_a_layer_that_no_draw_skips_is_captured(skips):
    program = with_skips(skips)
    assert num_layers(program) == 2
    assert not any("rand" in str(n.target) or "uniform" in str(n.target) for n in program.graph.graph.nodes)


def test_a_layer_that_every_draw_skips_is_left_out():
    assert num_layers(with_skips(lambda: torch.rand([]) > -1.0)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "skips",
    [
        lambda: torch.rand([]) < 0.1,
        lambda: torch.rand([]) - 1 < 0.0,
        lambda: torch.rand([]).mul_(-1) < 0.0,
        lambda: torch.empty([]).uniform_(-1, 1) < 0.0,
        lambda: torch.randn([]) < 0.0,
    ],
)
def test_a_branch_that_depends_on_the_draw_is_refused(skips):
    with pytest.raises(PlanError, match="cannot be captured"):
        with_skips(skips)


@pytest.mark.parametrize("skips", [lambda: torch.rand([]) <= 0.0, lambda: not torch.rand(1) > 0.0])
def test_that_a_draw_is_not_zero_is_assumed_and_reported(skips: Callable[[], bool | Tensor]) -> None:
    program = with_skips(skips)
    assert num_layers(program) == 2
    assert ["not exactly 0" in str(assumption) for assumption in program.assumptions] == [True]
