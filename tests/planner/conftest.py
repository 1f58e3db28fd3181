"""A small plan made by hand: two blocks, tp 2 and pp 2, one of everything that a plan can hold."""

import pytest

from passes.program.program import BoundaryPlan
from passes.types.conversions import CollectivePlan
from passes.types.types import I, Placement, Segment, V
from planner.cost.layout import CostPlan
from planner.cost.memory import MemoryRow
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import SchedulePlan, build_schedule
from planner.regions.regions import GraphRegion
from planner.regions.static_memory import GraphSlots
from planner.sharding.boxes import Part
from planner.sharding.buffers import BucketPlan, BufferPlan, OptimizerPlan
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Diagnostic, StagePlan, Summary

SPEC = {"mesh": {"tp": 2, "pp": 2}, "batch": {"global": 8, "micro": 2}, "optimizer": {"betas": (0.9, 0.95)}}
HIDDEN = BoundaryPlan("add_1", (2, 16, 8), "float32", 1024)


def parameter(name: str, placement: Placement, shape: tuple[int, ...], style: str, stages: tuple[int, ...], **rest):
    reason = {"replicate": "outside the parallel regions"}.get(style, "cheapest typing of its block")
    fields = {"reason": reason, "origin": "solver", "where": "gpt.py:7"} | rest
    return ParameterPlan.of(
        Part(placement, 2), name=name, shape=shape, dtype="float32", style=style, stages=stages, **fields
    )


def block(i: int) -> list[ParameterPlan]:
    """Multi-query attention (one key head stands whole on every rank) and an MLP."""
    qkv = Placement("V", 0, (Segment(8), Segment(4, False), Segment(4, False)))
    return [
        parameter(f"h.{i}.ln.weight", I, (8,), "replicate", (i,)),
        parameter(f"h.{i}.attn.qkv.weight", qkv, (16, 8), "column", (i,)),
        parameter(f"h.{i}.attn.out.weight", V(1, 8), (8, 8), "row", (i,)),
        parameter(f"h.{i}.mlp.up.weight", V(0, 32), (32, 8), "column", (i,)),
        parameter(f"h.{i}.mlp.down.weight", V(1, 32), (8, 32), "row", (i,), origin="spec.yaml:7"),
    ]


def collectives(i: int) -> list[CollectivePlan]:
    places = [("attn.qkv", "backward"), ("attn.out", "forward"), ("mlp.up", "backward"), ("mlp.down", "forward")]
    return [
        CollectivePlan(
            "all_reduce", "tp", phase, f"h.{i}.{m}   (gpt.py:9, `x[b, s]`)", 1024, 1, "microbatch", i, f"h.{i}"
        )
        for m, phase in places
    ]


@pytest.fixture
def small_plan() -> Plan:
    embedding = V(0, 50, padding=206)
    loss = "loss   (gpt.py:20)"
    return Plan(
        spec=SPEC,
        mesh=Mesh(tp=2, pp=2, vpp=1, dp=1, cp=1, ep=1, etp=1, edp=2, world_size=4, order="tp-cp-ep-dp-pp"),
        parameters=(
            parameter("wte.weight", embedding, (50, 8), "vocab", (0, 1), aliases=("head.weight",)),
            *block(0),
            *block(1),
        ),
        collectives=(
            *collectives(0),
            *collectives(1),
            CollectivePlan("all_reduce", "tp", "forward", loss, 128, 3, "microbatch", 1),
            CollectivePlan("all_reduce", "embedding", "step", "wte.weight", 4096, 1, "step"),
        ),
        stages=(
            StagePlan(0, 0, 0, ("h.0",), 1160, sends=(HIDDEN,)),
            StagePlan(1, 1, 0, ("h.1",), 1160, receives=(HIDDEN,)),
        ),
        schedule=SchedulePlan("1f1b", 4, build_schedule("1f1b", 2, 4).orders, 0.2, (2, 1)),
        graph_regions=(GraphRegion("h.0", "attn", False, "gloo collectives cannot be captured", ("x",), ("y",)),),
        graph_slots=(GraphSlots(0, 0, 1, 2, 4, 8, 512, 512, 1024, (0, 1, 0, 1)), GraphSlots(1, None, 0, 1, 1, 1, 256)),
        optimizer=OptimizerPlan(
            (BufferPlan(0, "float32", "float32", 1024, 1024, (BucketPlan(0, 1024, ("wte.weight",)),)),)
        ),
        memory=(MemoryRow(0, 4096, 4096, 8192, 2048), MemoryRow(1, 4096, 4096, 8192, 1024)),
        cost=CostPlan(0.004, 0.002, tp_comm=0.001, pp_bubble=0.001),
        diagnostics=(
            Diagnostic(
                "warning", "the op aten.foo has no rule: computed whole on every rank", "h.0.attn", "add a rule"
            ),
            Diagnostic(
                "warning", "the op aten.foo has no rule: computed whole on every rank", "h.1.attn", "add a rule"
            ),
            Diagnostic("info", "the mask is causal: attention uses is_causal"),
        ),
        summary=Summary(0.955, 0.9, 2304),
    )
