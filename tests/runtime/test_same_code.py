"""Ranks with equal plans and other versions or code are refused before they train; hash seeds do not matter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

import passes.lower
from examples.gpt import GPT
from passes.errors import PlanError
from planner import Plan, plan
from runtime.engine.engine import Engine
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

SIZE, WIDTH = 4, 8


class Scaled(nn.Module):
    """No table of the plan shows ``factor``: it is a number among the ops."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor, self.up, self.down = factor, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x) * self.factor)) ** 2).mean()


def planned(factor: float = 2.0, axis: str = "dp") -> Plan:
    inputs = {"x": {"shape": [WIDTH], "dtype": "float32"}}
    return plan(Scaled(factor), {"mesh": {axis: 2}, "batch": {"global": SIZE, "micro": 1}, "inputs": inputs})


def outcome(decided: Plan) -> str:
    """The loss of one step, or the error."""
    try:
        with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
            return f"{engine.train_step({'x': torch.ones(SIZE, WIDTH)}).loss:.6f}"
    except PlanError as error:
        return error.what


def another_graph() -> str:
    return outcome(planned(3.0 if os.environ["RANK"] == "1" else 2.0))


def another_lowering(axis: str) -> str:
    """Rank 1 lowers as another version of the passes might: linears stay those of torch."""
    if os.environ["RANK"] == "1":
        passes.lower.PASSES = tuple(step for step in passes.lower.PASSES if step.name != "own_linears")
    return outcome(planned(axis=axis))


DRAWS = [("fast", {"cp": 2}), ("layout_invariant", {"tp": 2}), ("layout_invariant", {"cp": 2})]


def draws(dropout: str, mesh: dict[str, int]) -> float:
    model = GPT(vocabulary=32, length=8, width=16, num_layers=1, num_heads=2, dropout=0.1).train()
    ids = {"shape": [8], "dtype": "int64", "high": 32}
    spec = {"mesh": mesh, "batch": {"global": 2, "micro": 2}, "inputs": {"input_ids": ids, "targets": ids}}
    batch = {name: torch.ones(2, 8, dtype=torch.int64) for name in spec["inputs"]}
    with Engine(plan(model, spec | {"dropout": dropout}), timeout_seconds=HANG_SECONDS) as engine:
        return engine.train_step(batch).loss


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "mesh"), DRAWS, ids=str)
def test_streams_that_are_named_by_a_place_are_no_difference(dropout: str, mesh: dict[str, int]):
    first, second = Ranks(2, "processes").run(draws, dropout, mesh)
    assert first == second


def test_tables_do_not_show_a_number_among_the_ops():
    assert planned(2.0).hash() == planned(3.0).hash()


@pytest.mark.thorough
@pytest.mark.slow
def test_another_captured_graph_under_an_equal_plan_is_refused_on_all_ranks():
    told = Ranks(2, "processes").run(another_graph)
    assert told[0] == told[1]
    assert "the captured graph (by hash) differs between ranks: rank 1 of 2 (rank 1 has" in told[0]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("axis", "kind"), [("dp", "code"), ("tp", "ops")])
def test_a_stage_that_was_lowered_otherwise_is_refused_on_all_ranks(axis: str, kind: str):
    told = Ranks(2, "processes").run(another_lowering, axis)
    assert told[0] == told[1]
    assert f"the lowered {kind} of stage 0 (by hash) differs between ranks: rank 1 of 2 (rank 1 has" in told[0]


def ranks(changed: dict[str, str]) -> list[str]:
    """What two plain processes print, rank 1 with other environment variables."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    code = "from tests.runtime.test_same_code import *; print(outcome(planned()))"
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONHASHSEED": "1"}
    started = []
    for rank in ("0", "1"):
        more = {"RANK": rank, "LOCAL_RANK": rank} | (changed if rank == "1" else {})
        options = {"env": environment | more, "cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code], **options))
    return [process.communicate(timeout=HANG_SECONDS)[0].strip() for process in started]


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_that_hash_strings_by_other_seeds_agree():
    told = ranks({"PYTHONHASHSEED": "2"})
    assert told[0] == told[1]
    assert float(told[0]) > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_with_another_version_of_transformers_is_refused_in_one_line(tmp_path: Path):
    """Its metadata stands first on the path, as that of another environment would."""
    found = tmp_path / "transformers-1.2.3.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.2.3\n")
    told = ranks({"PYTHONPATH": str(tmp_path)})
    assert told[0] == told[1]
    assert "\n" not in told[0]
    assert told[0].startswith("the version of transformers differs between ranks: rank 1 of 2 (rank 1 has 1.2.3, most")
