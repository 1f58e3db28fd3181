"""Estimates of layouts beside the full plans of these layouts, their lower bound, and cores that processes share."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner import Plan, plan
from planner.cluster.cluster import Cluster
from planner.cluster.links import Group, seconds, wires
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate
from planner.cost.layout import Layout
from planner.cost.planned import cut_work
from planner.spec.spec import Spec
from tests.models import hugging_face
from tests.tools.captures import plan_again
from tests.tools.specs import inputs_of

CLUSTER = Cluster.model_validate(
    {
        "name": "eight",
        "device": {"name": "small", "flops": {"float32": 1e9}, "memory": 10**9, "bandwidth": 1e9, "launch": 1e-6},
        "links": [
            {"name": "inside", "devices": 4, "bandwidth": 1e9, "latency": 1e-6},
            {"name": "outside", "devices": 64, "bandwidth": 1e8, "latency": 1e-5},
        ],
        "overlap": 0.5,
    }
)
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "alone": ({}, "none", {}),
    "tp": ({"tp": 2, "dp": 2}, "none", {}),
    "pipeline": ({"tp": 2, "pp": 2, "dp": 2}, "none", {}),
    "sequence": ({"tp": 2, "pp": 2}, "none", SEQUENCE),
    "full": ({"pp": 2}, "full", {}),
    "selective": ({"tp": 2, "pp": 2}, "selective", SEQUENCE),
    "context": ({"cp": 2, "pp": 2}, "none", {}),
    "experts": ({"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1}, "none", {}),
    "a running mean": ({"pp": 2, "dp": 2}, "none", {}),
}
OPTIMIZERS = {"a running mean": {"ema": 0.9}}
CASES = [
    *[(family, layout) for family in ("gpt2", "llama") for layout in LAYOUTS if layout not in ("experts", *OPTIMIZERS)],
    *[("gpt2", layout) for layout in OPTIMIZERS],
    *[("t5", layout) for layout in ("alone", "tp", "pipeline", "full")],
    *[("mixtral", layout) for layout in ("tp", "pipeline", "selective", "experts")],
]


@cache
def planned(family: str, layout: str, pp: int, split: str = "auto") -> tuple[Plan, Spec]:
    mesh, recompute, parallel = LAYOUTS[layout]
    batch = hugging_face.batch(family)
    inputs = inputs_of(batch)
    spec = {
        "mesh": {**mesh, "pp": pp},
        "batch": {"global": 10 * mesh.get("dp", 1), "micro": 2},
        "inputs": inputs,
        "tensor_parallel": {"vocabulary_multiple": 8, **parallel},
        "recompute": recompute,
        "optimizer": OPTIMIZERS.get(layout, {}),
        "pipeline": {"split": split},
    }
    made = plan_again(hugging_face.build(family), spec)
    return made, Spec.load(made.spec)


def work_of(family: str, layout: str, pp: int) -> CutWork:
    made, spec = planned(family, layout, pp)
    decisions, shards = made.to_run()
    return cut_work(decisions, shards, spec, {LAYOUTS[layout][1]})


def layout_of(made: Plan, spec: Spec) -> Layout:
    decisions, _ = made.to_run()
    sizes = tuple(map(len, decisions.stages.blocks_of_stage))
    sequence_parallel = bool(spec.tensor_parallel.sequence_parallel)
    count, kind = made.schedule.num_microbatches, made.schedule.kind
    return Layout(made.mesh, 2, count, sequence_parallel, str(spec.recompute), kind, sizes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_estimate_from_one_stage_is_that_of_the_full_plan(family: str, layout: str) -> None:
    made, spec = planned(family, layout, LAYOUTS[layout][0].get("pp", 1))
    where = layout_of(made, spec)
    own = Estimate(work_of(family, layout, made.mesh.pp), where, CLUSTER, spec)
    whole = Estimate(work_of(family, layout, 1), where, CLUSTER, spec)
    assert whole.cost.step_seconds == pytest.approx(own.cost.step_seconds, rel=1e-6)
    for row, ours, theirs in zip(made.memory, own.memory, whole.memory, strict=True):
        assert ours.total == row.total
        assert theirs.total == row.total
        assert ours.of_microbatch == row.of_microbatch == theirs.of_microbatch
        assert (ours.parameters, ours.gradients, ours.optimizer) == (row.parameters, row.gradients, row.optimizer)
    assert whole.at_least <= whole.cost.step_seconds


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_embedding_and_a_loss_on_stages_of_their_own_cost_what_they_compute(family: str) -> None:
    (alone, _), layout = planned(family, "alone", 1), LAYOUTS["alone"]
    num_blocks = len(alone.to_run()[0].blocks.instances)
    made, spec = planned(family, "alone", 4, f"E|t*{num_blocks - 1}|t|L")
    where = layout_of(made, spec)
    own, one = (cut_work(*of.to_run(), spec, {layout[1]}, ends=True) for of in (made, alone))
    assert [end - first for first, end in own.ranges(where.sizes)] == [1, num_blocks - 1, 1, 1]
    estimates = [Estimate(work, where, CLUSTER, spec) for work in (own, one)]
    assert estimates[0].cost.step_seconds == pytest.approx(estimates[1].cost.step_seconds, rel=1e-6)
    for row, *rows in zip(made.memory, *(found.memory for found in estimates), strict=True):
        for ours in rows:
            assert ours.total == pytest.approx(row.total, rel=0.005)
            assert (ours.of_microbatch, ours.parameters) == (row.of_microbatch, row.parameters)
    seconds = estimates[1].stage_costs.forward
    two = replace(where, sizes=(num_blocks - 1, 1))
    together = Estimate(work_of(family, "alone", 1), two, CLUSTER, spec).stage_costs.forward
    assert min(seconds) > 0
    assert seconds[2] + seconds[3] == pytest.approx(together[1], rel=0.01)  # each stage computes its own masks


@pytest.mark.parametrize("layout", ["pipeline", "sequence", "full"])
def test_gradients_of_weights_that_wait_are_priced_and_held(layout: str) -> None:
    made, spec = planned("llama", layout, 2)
    work, where = work_of("llama", layout, 2), replace(layout_of(made, spec), num_microbatches=8)
    one, zero = (Estimate(work, replace(where, schedule=kind), CLUSTER, spec) for kind in ("1f1b", "zero_bubble"))
    assert zero.cost.pp_bubble < one.cost.pp_bubble
    assert (zero.cost.flops, zero.cost.optimizer) == (one.cost.flops, one.cost.optimizer)
    assert zero.cost.tp_comm >= one.cost.tp_comm  # its sums have nothing beside them
    assert zero.memory[-1].total > one.memory[-1].total
    assert zero.at_least <= zero.cost.step_seconds


def test_a_plan_holds_no_more_than_is_estimated_where_gradients_wait() -> None:
    batch = hugging_face.batch("gpt2")
    inputs = inputs_of(batch)
    asked = {"mesh": {"pp": 2}, "batch": {"global": 10, "micro": 2}, "inputs": inputs}
    made = plan(hugging_face.build("gpt2"), {**asked, "pipeline": {"schedule": "zero_bubble"}})
    spec = Spec.load(made.spec)
    found = Estimate(cut_work(*made.to_run(), spec, {"none"}), layout_of(made, spec), CLUSTER, spec)
    for row, ours in zip(made.memory, found.memory, strict=True):
        assert ours.total == pytest.approx(row.total, rel=0.01)


@pytest.mark.parametrize("layout", ["pipeline", "selective"])
def test_the_parts_of_a_cost_sum_to_the_step(layout: str) -> None:
    made, spec = planned("llama", layout, 2)
    cost = Estimate(work_of("llama", layout, 2), layout_of(made, spec), CLUSTER, spec).cost
    parts = (
        cost.compute, cost.recompute, cost.tp_comm, cost.cp_comm, cost.ep_comm, cost.pp_comm, cost.pp_bubble,
        cost.dp_comm, cost.optimizer,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(cost.step_seconds)
    assert min(parts) >= 0
    assert min(cost.compute, cost.tp_comm, cost.pp_comm, cost.pp_bubble) > 0
    assert bool(cost.recompute) == (layout == "selective")


# ---- processes that share the cores of one machine: what each loses, and what a pipeline's idle ranks give back


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
