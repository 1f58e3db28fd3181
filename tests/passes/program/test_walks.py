"""Walks over a small graph: two branches that meet."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.program.matrices import parameter_roles
from passes.program.walks import Reach, ancestors, in_order, leads_out, operands, readers, walk
from planner.capture.export import capture


@pytest.fixture
def nodes() -> dict[str, fx.Node]:
    """a → b → d, a → c → d → e; f stands apart."""
    graph = fx.Graph()
    found = {"a": graph.placeholder("a"), "f": graph.placeholder("f")}
    for name, read in (("b", "a"), ("c", "a"), ("d", "bc"), ("e", "d")):
        found[name] = graph.create_node("call_function", max, tuple(found[r] for r in read), name=name)
    return found


def names(found: object) -> str:
    return "".join(n.name for n in found)  # pyright: ignore


def test_each_node_comes_once_depth_first(nodes: dict[str, fx.Node]):
    assert names(walk([nodes["d"]], operands)) == "dcab"
    assert names(walk([nodes["a"]], readers)) == "acdeb"


def test_a_walk_stops_behind_what_it_is_told_and_enters_nothing_else(nodes: dict[str, fx.Node]):
    assert names(walk([nodes["a"]], readers, stop=lambda n: n is nodes["d"])) == "acdb"
    assert names(walk([nodes["a"]], readers, into=lambda n: n is not nodes["c"])) == "abde"
    assert names(walk([nodes["f"]], readers)) == "f"


def test_a_walk_ends_after_so_many(nodes: dict[str, fx.Node]):
    assert names(walk([nodes["a"]], readers, most=2)) == "ac"


def test_ancestors_are_the_nodes_and_all_that_they_are_made_of(nodes: dict[str, fx.Node]):
    assert ancestors([nodes["d"], nodes["f"]]) == {nodes[n] for n in "abcdf"}


@pytest.mark.parametrize("asked", ["abcdef", "fedcba", "dbafce"])
def test_reach_has_the_nodes_of_a_walk_in_whichever_order_it_is_asked(nodes: dict[str, fx.Node], asked: str):
    order = [nodes[n] for n in "afbcde"]
    for reach, step in ((Reach(order[::-1], operands), operands), (Reach(order, readers), readers)):
        for each in (*asked, "bc", "df", ""):
            found, start = reach.of([nodes[n] for n in each]), [nodes[n] for n in each]
            assert {n for n in order if n in found} == set(walk(start, step))


def test_reach_walks_to_the_node_before_alone(nodes: dict[str, fx.Node]):
    seen: list[str] = []
    reach = Reach([nodes[n] for n in "edcbfa"], lambda n: seen.append(n.name) or operands(n))
    reach.of([nodes["d"]])
    reach.of([nodes["e"]])
    assert seen == [*"dcba", "e"]


def test_in_order_every_node_comes_after_its_operands(nodes: dict[str, fx.Node]):
    order = in_order([nodes["e"]])
    assert len(order) == len(set(order)) == 5
    assert all(order.index(n) < order.index(node) for node in order for n in node.all_input_nodes)
    assert order[-1] is nodes["e"]


def test_what_is_given_is_left_out_with_all_that_stands_behind_it_alone(nodes: dict[str, fx.Node]):
    assert names(in_order([nodes["e"]], {nodes["d"]})) == "e"
    assert set(names(in_order([nodes["e"]], {nodes["b"]}))) == set("acde")


def test_a_value_that_all_ways_bring_back_to_its_group_does_not_lead_out(nodes: dict[str, fx.Node]):
    """b → d → e beside c → d: with d and c in no group, b comes back if e is of its group, unless e is of another."""
    assert not leads_out(nodes["b"], {nodes["b"]: 1, nodes["e"]: 1})
    assert leads_out(nodes["b"], {nodes["b"]: 1, nodes["e"]: 2})
    assert leads_out(nodes["b"], {nodes["b"]: 1})
    assert leads_out(nodes["b"], {nodes["b"]: 1, nodes["c"]: 2, nodes["e"]: 1})
    assert leads_out(nodes["e"], {nodes["e"]: 1})


# ---- what each parameter is for, told by the ops that read it


class Block(nn.Module):
    """A norm, an MLP that writes into the residual, a scale, and a head that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.sin()
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return {"loss": self.head(x * self.gain).square().mean()}


def test_scales_biases_residual_writes_and_the_rest():
    program = capture(Block(), {"x": torch.ones(2, 4)})
    assert parameter_roles(program.graph.graph, program.parameters) == {
        "norm.weight": "scale",
        "norm.bias": "bias",
        "up.weight": "",
        "up.bias": "bias",
        "down.weight": "residual",
        "down.bias": "bias",
        "head.weight": "",
        "gain": "scale",
    }
