"""Groups on links, and seconds of collectives, beside closed forms and bounds."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster.cluster import Cluster
from planner.cluster.links import Group, Wire, group, group_of, neighbours, seconds, send_seconds, wires
from planner.mesh import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ONE = (Wire(0.0, 100.0),)
TWO = (Wire(1e-6, 1e9), Wire(1e-5, 1e8))
POINTS = (
    Wire(1e-6, 1e9, sizes=((1e4, 1e8), (1e6, 8e8), (1e8, 1e9)), parts=((2, 1.0), (8, 0.5))),
    Wire(1e-5, 1e8, sizes=((1e6, 5e7), (1e7, 1e8)), parts=((4, 0.9), (32, 0.6))),
)
sizes = st.tuples(st.integers(1, 16), st.integers(1, 64))
amounts = st.floats(0, 1e12)


def cluster(*devices: int) -> Cluster:
    links = [{"name": str(n), "devices": n, "bandwidth": 1e9 / n, "latency": 1e-6} for n in devices]
    device = {"name": "x", "flops": {"float32": 1e12}, "memory": 10**9, "bandwidth": 1e9}
    return Cluster.model_validate({"name": "c", "device": device, "links": links})


@pytest.mark.parametrize(("kind", "moved"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75)])
def test_one_level_without_latency_is_the_closed_form(kind: str, moved: float) -> None:
    assert seconds(kind, 200.0, Group((4,)), ONE) == pytest.approx(moved * 200 / 100)


def test_an_all_to_all_sends_all_but_its_own_part() -> None:
    assert seconds("all_to_all", 200.0, Group((4,)), ONE) == pytest.approx(0.75 * 2)


def test_what_crosses_nodes_is_a_part_of_what_stays_inside() -> None:
    inside, outside = Wire(0.0, 100.0), Wire(0.0, 10.0)
    found = seconds("reduce_scatter", 800.0, Group((8, 4)), (inside, outside))
    assert found == pytest.approx(7 / 8 * 800 / 100 + 3 / 4 * 100 / 10)


@given(st.sampled_from(KINDS), sizes, amounts, amounts, st.sampled_from([TWO, POINTS]))
def test_more_bytes_never_take_less(
    kind: str, of: tuple[int, int], first: float, second: float, links: tuple[Wire, ...]
) -> None:
    low, high = sorted((first, second))
    assert seconds(kind, low, Group(of), links) <= seconds(kind, high, Group(of), links) * (1 + 1e-12)


@given(st.sampled_from(KINDS), sizes, amounts)
def test_more_nodes_never_take_less(kind: str, of: tuple[int, int], amount: float) -> None:
    wider = Group((of[0], of[1] + 1))
    assert seconds(kind, amount, Group(of), TWO) <= seconds(kind, amount, wider, TWO) * (1 + 1e-12)


@given(st.sampled_from(KINDS), sizes, amounts)
def test_no_collective_is_faster_than_the_bytes_that_a_device_must_move(
    kind: str, of: tuple[int, int], amount: float
) -> None:
    n = prod(of)
    least = (2 if kind == "all_reduce" else 1) * (n - 1) / n * amount / of[0] / TWO[0].bandwidth
    assert seconds(kind, amount, Group(of), TWO) >= least * (1 - 1e-9)


def test_a_small_sum_takes_a_tree() -> None:
    wide = (Wire(1e-5, 1e12),)
    assert seconds("all_reduce", 8.0, Group((64,)), wide) == pytest.approx(12e-5, rel=1e-3)


def test_groups_lie_in_nodes_as_the_order_has_them() -> None:
    machines = cluster(8, 64)
    mesh = Mesh(tp=4, pp=2, dp=8)
    assert group(mesh, "tp", machines) == Group((4, 1))
    assert group(mesh, "dp", machines) == Group((2, 4))
    assert group(mesh, "world", machines) == Group((8, 8))
    spread = Mesh(tp=4, pp=2, dp=8, order="dp-cp-ep-tp-pp")
    assert group(spread, "dp", machines) == Group((8, 1))
    assert group(spread, "tp", machines) == Group((1, 4))
    assert neighbours(mesh, machines, 0) == 1


def test_a_group_that_straddles_nodes_counts_as_its_slowest() -> None:
    assert group(Mesh(tp=6, dp=4), "tp", cluster(8, 24))[1] == 2
    assert group_of(range(16), (8, 16)) == Group((8, 2))


def test_a_message_takes_latency_and_bandwidth_and_none_takes_nothing() -> None:
    (wire,) = wires(cluster(4))
    assert send_seconds(8e8, wire) == pytest.approx(1e-6 + 8e8 / (1e9 / 4 * 0.8))
    assert send_seconds(0, wire) == 0.0


def measured(**more: object) -> Cluster:
    link = {"name": "x", "devices": 64, "bandwidth": 1e9, "latency": 1e-6, **more}
    device = {"name": "x", "flops": {"float32": 1e12}, "memory": 10**9, "bandwidth": 1e9}
    return Cluster.model_validate({"name": "c", "device": device, "links": [link]})


def test_bandwidth_is_that_of_measured_points_and_a_power_law_between_them() -> None:
    (wire,) = wires(measured(sizes=[[1e4, 0.1], [1e6, 0.4], [1e8, 0.9]], parts=[[2, 1.0], [32, 0.25]]))
    for size, rate in ((1.0, 1e8), (1e4, 1e8), (1e5, 2e8), (1e6, 4e8), (1e7, 6e8), (1e8, 9e8), (1e12, 9e8)):
        assert wire.rate(size, 2) == pytest.approx(rate)
    for parts, factor in ((1, 1.0), (2, 1.0), (8, 0.5), (32, 0.25), (64, 0.25)):
        assert wire.rate(1e8, parts) == pytest.approx(9e8 * factor)
    (slower,) = wires(measured(sizes=[[1e4, 0.1], [1e6, 0.4]]), 2.0)
    assert slower.rate(1e6, 8) == pytest.approx(2e8)


@pytest.mark.parametrize(("kind", "moved"), [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75)])
def test_points_replace_the_fraction(kind: str, moved: float) -> None:
    levels = wires(measured(sizes=[[1e4, 0.1], [1e6, 0.4]], parts=[[4, 0.5]], fraction=0.9))
    (wire,) = levels
    messages = {"all_reduce": 6, "all_gather": 3, "all_to_all": 3}[kind]
    expected = messages * wire.latency + moved * 1e6 / 2e8
    assert seconds(kind, 1e6, Group((4,)), levels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sizes": [[1e6, 0.5], [1e4, 0.1]]}, "has 10000 after 1e+06"),
        ({"sizes": [[1e4, 0.1], [2e4, 0.9]]}, "says that 20000 bytes take less time than 10000"),
        ({"sizes": [[1e4, 1.5]]}, "1.5"),
        ({"parts": [[2, 0.5], [2, 0.4]]}, "has 2 after 2"),
    ],
)
def test_points_that_cannot_be_measured_are_refused(more: dict[str, object], why: str) -> None:
    with pytest.raises(Exception, match=re.escape(why)):
        measured(**more)
