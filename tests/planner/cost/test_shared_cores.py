"""Processes that share the cores of one machine: what each loses, and what a pipeline's idle ranks give back."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cluster.cluster import Cluster
from planner.cluster.links import Group, seconds, wires
from planner.cost.estimate import Estimate
from tests.planner.cost.test_estimate import layout_of, planned, work_of


def cluster(at_once: int | None, **link: Any) -> Cluster:
    device = {"name": "core", "flops": {"float32": 1e9}, "memory": 10**9, "bandwidth": 1e9, "launch": 1e-9}
    given = {"name": "memory", "devices": 8, "bandwidth": 1e9, "latency": 1e-9, **link}
    return Cluster.model_validate(
        {"name": "cores", "device": device | {"at_once": at_once}, "links": [given], "overlap": 0.0}
    )


def step(layout: str, of: Cluster) -> float:
    pp = 2 if layout == "pipeline" else 1
    made, spec = planned("gpt2", layout, pp)
    where, work = layout_of(made, spec), work_of("gpt2", layout, pp)
    estimate = Estimate(work, where, of, spec)
    found = estimate.cost.step_seconds
    assert estimate.at_least <= found
    return found


def test_ranks_that_all_compute_at_once_share_the_cores():
    alone = step("tp", cluster(None))  # tp 2 · dp 2
    assert step("tp", cluster(4)) == pytest.approx(alone)
    assert step("tp", cluster(2)) == pytest.approx(2 * alone, rel=0.02)
    assert step("tp", cluster(1)) == pytest.approx(4 * alone, rel=0.02)


def test_what_ranks_of_a_pipeline_wait_is_the_others_time():
    alone, shared = step("pipeline", cluster(None)), step("pipeline", cluster(4))  # 8 ranks, some of which wait
    assert alone < shared < 1.95 * alone


def test_links_of_ranks_that_share_cores_are_slower_and_a_reduce_scatter_may_be():
    group, plain, slow = Group((4,)), cluster(2), cluster(2, reduce_scatter=3.0)
    whole = seconds("all_gather", 1e6, group, wires(plain))
    assert seconds("all_gather", 1e6, group, wires(plain, 2.0)) == pytest.approx(2 * whole)
    assert seconds("reduce_scatter", 1e6, group, wires(plain)) == pytest.approx(whole)
    assert seconds("reduce_scatter", 1e6, group, wires(slow)) == pytest.approx(3 * whole)
    assert seconds("all_reduce", 1e6, group, wires(slow)) == seconds("all_reduce", 1e6, group, wires(plain))
