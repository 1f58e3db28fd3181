"""Bytes of a rank: each category of a plan by formula, and what the allocator reserves."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.on_gpu.models import llama
from benchmarks.on_gpu.profile import plan_of
from planner import Plan, plan
from planner.cluster.cluster import GPU_SLACK, Cluster, read_cluster
from planner.cost.memory import SLACK, MemoryRow, on_device
from planner.mesh import Mesh
from tests.models.small import BATCH, LENGTH, WIDTH, Body, Layer, Model, in_order, layers

HALF, SINGLE, DOUBLE = "bfloat16", "float32", "float64"
INPUTS = {name: {"shape": [LENGTH], "dtype": "int64"} for name in ("input_ids", "labels")}


def planned(model: nn.Module, mesh: dict[str, int] | None = None, microbatches: int = 1, **more: Any) -> Plan:
    mesh = mesh or {}
    spec = {
        "mesh": mesh,
        "batch": {"global": BATCH * microbatches * mesh.get("dp", 1), "micro": BATCH},
        "inputs": INPUTS,
        "tensor_parallel": {"vocabulary_multiple": 8},
    }
    return plan(model, spec | more)


@pytest.fixture(scope="module")
def four() -> nn.Module:
    with torch.device("meta"):
        return Model(layers(4)())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", [1, 4])
@pytest.mark.parametrize(
    ("parameter", "gradient", "fixed", "shared"),
    [(HALF, HALF, 4, 16), (HALF, SINGLE, 6, 12), (SINGLE, SINGLE, 8, 8), (DOUBLE, DOUBLE, 16, 16)],
)
def test_bytes_a_parameter_are_those_of_the_zero1_table(
    parameter: str, gradient: str, fixed: int, shared: int, d: int
) -> None:
    with torch.device("meta"):
        model = Model(layers(1)())
    made = planned(model, {"dp": d}, precision={"parameters": parameter, "gradients": gradient})
    (row,), num_elements = made.memory, sum(b.num_elements for b in made.optimizer.buffers)
    assert num_elements >= sum(p.numel() for p in model.parameters())
    assert row.parameters + row.gradients == fixed * num_elements
    assert row.optimizer == shared * num_elements // d


def test_without_zero_every_rank_holds_the_whole_optimizer() -> None:
    with torch.device("meta"):
        model = Model(layers(1)())
    alone = planned(model, optimizer={"alignment": "none"})
    copy = planned(model, {"dp": 2}, optimizer={"zero": 0, "alignment": "none"})
    assert copy.memory[0].optimizer == alone.memory[0].optimizer


def test_frozen_parameters_have_no_gradient_and_no_optimizer() -> None:
    with torch.device("meta"):
        model = Model(layers(2)())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    (row,) = planned(model, optimizer={"alignment": "none"}).memory
    assert row.gradients == 4 * sum(p.numel() for p in model.head.parameters())
    assert row.optimizer == 2 * row.gradients


@pytest.mark.thorough
def test_frozen_layers_keep_nothing_but_what_the_head_reads() -> None:
    with torch.device("meta"):
        model = Model(layers(2)())
    whole = planned(model).memory[0]
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    (row,) = planned(model).memory
    assert row.activations < whole.activations / 5


@pytest.mark.thorough
def test_the_first_rank_of_1f1b_holds_the_most_microbatches_and_its_peak_is_named(four: nn.Module) -> None:
    rows = planned(four, {"pp": 4}, microbatches=8).memory
    held = [row.activations / sum(row.of_microbatch) for row in rows[:3]]
    assert held == [4, 3, 2]
    assert [row.peak[0] for row in rows] == ["B", "B", "B", "B"]
    assert rows[1].communication > 0
    assert rows[3].logits > 0
    assert all(row.logits == 0 for row in rows[:3])


def told(made: Plan) -> list[str]:
    """The rows of the memory table of a plan, as text."""
    table = made.describe().partition("per microbatch  peak\n")[2]
    return [line.rstrip() for line in table.split("\n\n")[0].splitlines()]


def test_chunks_of_a_rank_are_told_one_by_one(four: nn.Module) -> None:
    made = planned(four, {"pp": 2, "vpp": 2}, microbatches=4, pipeline={"schedule": "interleaved_1f1b"})
    assert [len(row.of_microbatch) for row in made.memory] == [2, 2]
    assert all(line.endswith(f" {row.peak}") for row, line in zip(made.memory, told(made), strict=True))


@pytest.mark.thorough
def test_the_total_is_the_sum_and_slack_a_part_of_what_comes_and_goes(four: nn.Module) -> None:
    for row in planned(four, {"pp": 2}, microbatches=4).memory:
        comes_and_goes = row.activations + row.logits + row.working + row.communication
        assert row.slack == pytest.approx(SLACK * comes_and_goes, abs=1)
        assert row.total == row.parameters + row.gradients + row.optimizer + comes_and_goes + row.slack


@pytest.mark.thorough
def test_sequence_parallelism_divides_what_lies_between_the_products(four: nn.Module) -> None:
    whole, half = (
        planned(four, {"tp": 2}, tensor_parallel={"sequence_parallel": cut, "vocabulary_multiple": 8}).memory[0]
        for cut in (False, True)
    )
    assert half.activations < whole.activations
    assert half.parameters == whole.parameters


@pytest.mark.thorough
def test_more_layers_keep_as_much_more(four: nn.Module) -> None:
    with torch.device("meta"):
        wide = {n: Model(Body(in_order, layers=nn.ModuleList(Layer(2) for _ in range(n)))) for n in (2, 3, 5)}
    kept = {n: planned(model).memory[0].of_microbatch[0] for n, model in wide.items()}
    assert kept[5] - kept[3] == 2 * (kept[3] - kept[2])


@pytest.mark.thorough
def test_a_boundary_is_kept_by_the_stage_that_receives_it(four: nn.Module) -> None:
    one = planned(four).memory[0].of_microbatch[0]
    parts = [row.of_microbatch[0] for row in planned(four, {"pp": 2}, microbatches=2).memory]
    assert one <= sum(parts) <= one + BATCH * LENGTH * WIDTH * 4


# ---- what the allocator reserves: a share of the tensors, which is never below the rows that were measured on a GPU


RESULTS = Path(__file__).parents[3] / "benchmarks" / "RESULTS.md"
MOST_ABOVE = 1.06
RUNS = ((0.0, "none"), (0.1, "none"), (0.0, "full"))  # the columns of the table: dropout of attention, recompute


def figures(name: str) -> list[list[float]]:
    """A row of the table of `python benchmarks/gpu.py profile`, run by run."""
    (row,) = (line for line in RESULTS.read_text().splitlines() if line.startswith(f"| {name} |"))
    return [[float(figure) for figure in cell.split(",")] for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("run", range(len(RUNS)))
def test_the_slack_of_the_stored_rows_covers_what_was_reserved(run: int) -> None:
    (lived,), (reserved,) = figures("peak GiB by the plan")[run], figures("reserved GiB")[run]
    *stays, _ = figures("plan: parameters, gradients, optimizer, activations GiB")[run]
    parameters, gradients, optimizer, comes = (int(gib * 2**30) for gib in (*stays, lived - sum(stays)))
    row = MemoryRow(0, parameters, gradients, optimizer, comes, slack=ceil(SLACK * comes))
    assert 1 <= of(row).total / 2**30 / reserved <= MOST_ABOVE


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_a_plan_is_at_least_what_was_reserved_and_little_more(run: int) -> None:
    dropout, recompute = RUNS[run]
    model, sizes = llama(tiny=False, attention_dropout=dropout)
    made = plan_of(model, sizes["max_position_embeddings"], sizes["vocab_size"], recompute=recompute)
    (row,), (reserved,) = made.memory, figures("reserved GiB")[run]
    assert 1 <= (row.total - row.device) / 2**30 / reserved <= MOST_ABOVE


def of(row: MemoryRow, **device: float | None) -> MemoryRow:
    cluster = read_cluster("h200")
    values = cluster.to_dict()
    values["device"] |= {"context": None, **device}
    (found,) = on_device([row], Mesh(), Cluster.model_validate(values))
    return found


@pytest.mark.check
def test_the_slack_is_the_larger_of_both_shares() -> None:
    stays = MemoryRow(0, parameters=600, gradients=100, optimizer=200, activations=100, slack=5)
    comes = MemoryRow(0, parameters=0, gradients=0, optimizer=0, activations=1000, slack=50)
    assert (of(stays).slack, of(comes).slack) == (70, 70)
    assert (of(stays, slack=0.1).slack, of(comes, slack=0.01).slack) == (100, 50)
    assert of(stays).total == 1070
    assert (of(stays, processors=None).slack, of(stays, processors=None, slack=0.2).slack) == (5, 200)  # of a CPU
    assert on_device([stays], Mesh(), None) == (stays,)
    assert GPU_SLACK == 0.07
