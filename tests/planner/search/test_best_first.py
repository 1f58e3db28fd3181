"""The best layouts are those of plain enumeration, whatever the cluster, the model and the pins."""

import random
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from passes.errors import PlanError
from planner.cluster.cluster import Cluster
from planner.cost.estimate import Estimate
from planner.search.best_first import BestFirst, Candidate, losers
from planner.search.cuts import Cuts
from planner.search.space import Cut, Point, Space
from planner.spec.fields import AUTO
from tests.models.deep import captured, spec_of

KINDS = ("none", "selective", "full")
PINS: list[dict[str, Any]] = [
    {},
    {"mesh": {"tp": "auto", "pp": "auto"}},
    {"mesh": {"tp": 2, "pp": "auto", "vpp": "auto"}, "recompute": "auto", "pipeline": {"schedule": "auto"}},
    {"recompute": "full", "batch": {"global": 16, "micro": 1}},
    {"pipeline": {"schedule": "gpipe"}},
]


def cluster(seed: int) -> Cluster:
    """Devices and links drawn at random."""
    draw = random.Random(seed)
    node = draw.choice([2, 4, 8])
    device = {
        "name": "drawn",
        "flops": {"float32": 10 ** draw.uniform(9.5, 12)},
        "memory": 10**10,
        "bandwidth": 10 ** draw.uniform(9, 12),
        "launch": 10 ** draw.uniform(-8, -5),
    }
    links = [
        {
            "name": f"joins {devices}",
            "devices": devices,
            "bandwidth": 10 ** draw.uniform(7, 11),
            "latency": 10 ** draw.uniform(-6, -4),
        }
        for devices in (node, 8 * node)
    ]
    return Cluster.model_validate({"name": "drawn", "device": device, "links": links, "overlap": draw.random()})


@cache
def cuts_of(name: str) -> Cuts:
    return Cuts(captured(name), spec_of(name), KINDS)


@cache
def works_of(name: str, cut: Cut):
    """By kind of recompute; None where the model does not admit the cut."""
    try:
        return cuts_of(name).works(cut)
    except PlanError:
        return None


class Enumerated:
    """All layouts of one case, each estimated."""

    def __init__(self, name: str, seed: int) -> None:
        draw = random.Random(seed)
        self.name, self.cluster = name, cluster(seed)
        self.spec = spec_of(name, **{"batch": {"global": 16}, **draw.choice(PINS)})
        devices = draw.choice([4, 8, 16] if name == "gpt2" else [4, 8])  # experts have more layouts of as many
        space = Space(self.spec, devices, self.cluster.links[0].devices, cuts_of(name).facts)
        self.points = [
            point
            for cut in space.cuts()
            if works_of(name, cut) is not None
            for point in space.points(cut, partial(cuts_of(name).stages, cut))
        ]
        self.memory = 10 ** draw.uniform(5.2, 6.5)  # bytes: the smaller half rules layouts out

    def work(self, point: Point):
        works = works_of(self.name, point.cut)
        assert works is not None
        return works[point.layout.recompute]

    def estimate(self, point: Point) -> Estimate:
        return Estimate(self.work(point), point.layout, self.cluster, self.spec)

    def fixed(self, point: Point) -> list[float]:
        return [sum(held.lasting[:3]) for held in self.estimate(point).holds]

    def best(self, top: int, *, least_zero: bool = False) -> list[Candidate]:
        """``least_zero``: without those that fit with a smaller zero."""
        found = [Candidate(point, self.estimate(point)) for point in self.points]
        fitting = [c for c in found if c.fullest.total <= self.memory]
        if least_zero:
            least = {}
            for c in sorted(fitting, key=lambda c: -c.point.layout.zero):
                least[c.point.cut, replace(c.point.layout, zero=0)] = c
            fitting = list(least.values())
        return sorted(fitting, key=lambda c: c.order)[:top]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_the_best_layouts_are_those_of_plain_enumeration(name: str, seed: int):
    case = Enumerated(name, seed)
    assert case.points
    order = BestFirst(case.points, case.estimate, case.memory)
    found = order.search(5)
    assert [(c.point, c.seconds) for c in found.best] == [(c.point, c.seconds) for c in case.best(5, least_zero=True)]
    assert found.num_estimated + found.num_fixed <= len(case.points)
    for candidate in order.known:
        assert candidate.estimate.at_least <= candidate.seconds
        assert max(case.fixed(candidate.point)) <= candidate.fullest.total
    for choice, rows in order.groups().items():
        assert all(point.choices[choice[0]] == choice[1] for _, _, point in rows)
        best = [c for c in case.best(len(case.points)) if c.point.choices.get(choice[0]) == choice[1]][:1]
        one = order.one_of(rows, 16)
        assert one.point in [point for *_, point in rows]
        assert not order.fits(one) or one.seconds >= best[0].seconds


@pytest.mark.thorough
def test_reasons_price_at_most_one_more_layout_for_each_choice():
    """A search for the exact best layout of each choice took several times as long as the search itself."""
    case = Enumerated("gpt2", 6)
    order = BestFirst(case.points, case.estimate, case.memory)
    best, before = order.search(5).best, num_priced(order)
    rows = losers(order, best[0], case.cluster)
    assert 0 < len(rows) <= len(order.groups())
    assert num_priced(order) - before <= len(order.groups())
    for row in rows:
        name, _, value = row.choice.partition(",")[0].rpartition(" ")
        assert str(row.candidate.point.choices[name]) in (value, str(value == "on"))
        assert row.fits == order.fits(row.candidate)


def num_priced(order: BestFirst) -> int:
    return sum("cost" in vars(candidate.estimate) for candidate in order.known)


@pytest.mark.thorough
def test_cases_have_layouts_that_fit_and_layouts_that_do_not():
    cases = [Enumerated("gpt2", seed) for seed in range(12)]
    fitting = [len(case.best(len(case.points))) for case in cases]
    assert any(fitting)
    assert any(number < len(case.points) for case, number in zip(cases, fitting, strict=True))
    assert any(case.spec.mesh.tp == AUTO for case in cases)


def test_two_chunks_a_rank_may_be_folded():
    """A layout is laid onto ranks as its schedule has it, and none is estimated below what it must take."""
    pins = {"mesh": {"tp": 1, "pp": "auto", "vpp": 2}, "pipeline": {"schedule": "auto"}}
    spec, where = spec_of("gpt2", **{"batch": {"global": 16, "micro": 2}, **pins}), cluster(3)
    space = Space(spec, 8, 8, cuts_of("gpt2").facts)
    cut = next(iter(space.cuts()))
    points = list(space.points(cut, partial(cuts_of("gpt2").stages, cut)))
    folds = {(point.layout.schedule, point.layout.mesh.fold) for point in points}
    assert folds == {("interleaved_1f1b", "loop"), ("zero_bubble_v", "v")}
    works = works_of("gpt2", cut)
    assert works is not None
    for point in points:
        work, layout = works[point.layout.recompute], point.layout
        found = Estimate(work, layout, where, spec)
        assert found.at_least <= found.cost.step_seconds
