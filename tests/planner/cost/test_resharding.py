"""Weights in shards stay whole for a step if the spec leaves it to the plan and the devices have the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import PlanError, plan
from tests.models.plannable import build, spec_of

SHIPPED = Path(__file__).parents[3] / "specs/clusters/dgx-a100.yaml"


def planned(folder: Path, asked: Any, share: float | None, **batch: int) -> Any:
    """``share``: of a gigabyte of a device of the cluster that a rank may fill; None: no cluster."""
    spec = spec_of("gpt2", mesh={"dp": 2}, optimizer={"zero": 3, "reshard": asked}) | {"batch": batch}
    if share is not None:
        values = yaml.safe_load(SHIPPED.read_text())
        values["device"] |= {"memory": 1e9, "usable_memory": share, "context": None}
        values["links"] = [{**link, "communicator": None} for link in values["links"]]
        (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
        spec["cluster"] = str(folder / "cluster.yaml")
    return plan(build("gpt2"), spec)


def notes(made: Any) -> list[str]:
    return [row.what for row in made.diagnostics if row.where == "optimizer.reshard"]


def gathers(made: Any) -> dict[str, int]:
    rows = [row for row in made.collectives if row.kind == "all_gather"]
    return {phase: sum(row.count for row in rows if row.phase == phase) for phase in ("forward", "backward")}


SMALL = 1e-4
SEVERAL = {"global": 8, "micro": 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("asked", "share", "reshards", "note"),
    [
        ("auto", 1.0, False, "gathered once a step and whole until its end: the fullest rank needs"),
        ("auto", SMALL, True, "freed after each use: gathered once a step and whole until its end, they do not fit"),
        ("auto", None, True, "without a cluster the plan does not know whether they fit"),
        (True, 1.0, True, ""),
        (False, SMALL, False, ""),
    ],
    ids=str,
)
def test_the_plan_chooses_by_memory_and_says_why(tmp_path: Path, asked, share, reshards: bool, note: str):
    made = planned(tmp_path, asked, share, **SEVERAL)
    assert made.shards.reshards is reshards
    assert (gathers(made)["backward"] > 0) is reshards
    assert len(notes(made)) == bool(note)
    assert all(note in what for what in notes(made))


def test_one_microbatch_leaves_no_choice(tmp_path: Path):
    made = planned(tmp_path, "auto", 1.0, **{"global": 2, "micro": 1})
    assert (made.shards.reshards, notes(made)) == (True, [])


def test_more_blocks_than_the_model_has_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"optimizer\.reshard is 99, and the model has \d+ blocks"):
        planned(tmp_path, 99, None, **SEVERAL)
