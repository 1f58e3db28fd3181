"""Walks over a small graph: two branches that meet."""

from __future__ import annotations

import pytest
from torch import fx

from passes.program.walks import ancestors, in_order, leads_out, operands, readers, walk


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
