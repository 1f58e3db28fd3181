"""What the allocator reserves: a share of the tensors, which is never below the rows that were measured on a GPU."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

from benchmarks.on_gpu.models import llama
from benchmarks.on_gpu.profile import plan_of
from planner.cluster.cluster import GPU_SLACK, Cluster, read_cluster
from planner.cost.memory import SLACK, MemoryRow, on_device
from planner.mesh import Mesh

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
