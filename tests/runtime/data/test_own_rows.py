"""Each dp rank of a run makes its own rows of a batch, no others; together they are the global batch.
So with a loader and a sampler of the user's own (examples/own_data.py).
"""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.own_data import train
from passes.errors import PlanError
from runtime.data.batches import BatchLayout
from runtime.data.objectives.next_token import Packed
from runtime.data.token_batches import OwnRows
from runtime.training.job import Job
from runtime.training.loop import run_rank
from runtime.training.run import largest_difference
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

GLOBAL, STEPS, LENGTH = 8, 3, 8
MODEL = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from examples.gpt import GPT

def build():
    torch.manual_seed(0)
    return GPT(length={LENGTH}, width=16, num_layers=2, num_heads=2, dropout=0.0)
"""


class Numbers:
    """Row r of step s is 100·s + r."""

    def batch(self, step: int, rows: slice | None = None) -> dict[str, torch.Tensor]:
        return {"x": 100 * step + torch.arange(GLOBAL)[rows or slice(None)]}

    def size_of(self, step: int) -> int:
        return GLOBAL


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_rows_of_all_ranks_are_the_global_batch_in_its_order(dp: int):
    layouts = [BatchLayout({}, GLOBAL, 2, dp, rank) for rank in range(dp)]
    parts = [OwnRows(Numbers(), layout).batch(3)["x"] for layout in layouts]
    assert torch.equal(torch.cat(parts), Numbers().batch(3)["x"])
    assert {len(part) for part in parts} == {GLOBAL // dp}


def job_in(directory: Path, dp: int, **more: Any) -> Job:
    (directory / "model.py").write_text(MODEL)
    for name in ("text", "other"):
        (directory / f"{name}.txt").write_bytes(bytes(random.Random(name).choices(range(32, 127), k=2000)))
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 256}
    spec = {
        "mesh": {"dp": dp},
        "batch": {"global": GLOBAL, "micro": 2},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
    }
    (directory / "spec.yaml").write_text(yaml.safe_dump(spec | {"data": {"validation": 0.2}}))
    job = Job(f"{directory}/model.py:build", f"{directory}/spec.yaml", f"{directory}/text.txt", STEPS, quiet=True)
    return replace(job, **more)


def made_by_a_run(job: Job) -> list[int]:
    """The samples that this rank made."""
    made: list[int] = []
    sample = Packed.sample

    def counted(self: Packed, index: int, epoch: int) -> Any:
        made.append(index)
        return sample(self, index, epoch)

    Packed.sample = counted
    run_rank(job)
    return made


@pytest.mark.slow
def test_a_rank_makes_its_share_of_the_samples(tmp_path: Path):
    found = Ranks(2, "processes").run(made_by_a_run, job_in(tmp_path, 2))
    first, second = (made[2:] for made in found)  # the first of each text is made once, to see which roles there are
    assert len(first) == len(second) == STEPS * GLOBAL // 2
    assert not set(first) & set(second)


@pytest.mark.thorough
@pytest.mark.slow
def test_training_and_validation_are_those_of_global_batches(tmp_path: Path):
    rows = Ranks(2, "processes").run(run_rank, job_in(tmp_path, 2, compare=True, validate_every=1))[0].rows
    alone = run_rank(job_in(tmp_path, 1, validate_every=1)).rows
    assert largest_difference(rows) < 1e-6
    assert [row.validation_loss for row in rows] == pytest.approx([row.validation_loss for row in alone], rel=1e-6)


def refused(job: Job) -> str:
    other = str(Path(job.data).with_name("other.txt")) if os.environ["RANK"] == "1" else job.data
    with pytest.raises(PlanError) as error:
        run_rank(replace(job, data=other))
    return error.value.what


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_with_another_text_is_named(tmp_path: Path):
    told = Ranks(2, "processes").run(refused, job_in(tmp_path, 2))
    assert told[0] == told[1]
    assert told[0].startswith("the data (by content) differs between ranks: rank 1 of 2 (rank 1 has")


# ---- examples/own_data.py: a user's own loader and sampler train the same on two processes as alone


@pytest.mark.thorough
@pytest.mark.slow
def test_a_loader_of_ones_own_trains_the_same_on_two_processes_as_alone() -> None:
    alone = train(1)
    first, second = Ranks(2, "processes").run(train, 1)
    assert first == second == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 25
    assert alone[-1] < alone[0]
