"""Bytes in shards by formula: parameters, gradients and moments of a rank for each ``zero``; full ones for a time."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from passes.errors import PlanError
from planner import plan
from planner.cost.whole import Apart, Filling, most_gradients, most_until_weights
from planner.pipeline.actions import Action, Order
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

DP = 4
NORM, MATRIX, OTHER = (0, 0), (0, 1), (1, 0)
fills = partial(Filling, NORM)
# bytes of an element, by (zero, precision): parameters, gradients, optimizer; (whole, share of one rank)
FORMULA = {
    (0, "float32"): ((4, 0), (4, 0), (8, 0)),
    (1, "float32"): ((4, 0), (4, 0), (0, 8)),
    (2, "float32"): ((4, 0), (0, 4), (0, 8)),
    (3, "float32"): ((0, 4), (0, 4), (0, 8)),
    (1, "bfloat16"): ((2, 0), (4, 0), (0, 12)),
    (2, "bfloat16"): ((2, 0), (0, 4), (0, 12)),
    (3, "bfloat16"): ((0, 2), (0, 4), (0, 12)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(("zero", "precision"), FORMULA, ids=str)
def test_bytes_of_a_rank_are_those_of_the_formula(model: str, zero: int, precision: str):
    asked = {"zero": zero, "alignment": "none"}
    given = {"mesh": {"dp": DP}, "batch": {"global": 8, "micro": 1}, "optimizer": asked}
    made = plan_again(build(model), spec_of(model, **given, precision={"parameters": precision}))
    elements = sum(buffer.num_elements for buffer in made.optimizer.buffers)  # buckets end on multiples of dp
    registered = made.memory[0].parameters - _bytes(FORMULA[zero, precision][0], elements)
    assert registered == _registered(model, precision)
    assert made.memory[0].gradients == _bytes(FORMULA[zero, precision][1], elements)
    assert made.memory[0].optimizer == _bytes(FORMULA[zero, precision][2], elements)
    assert (made.memory[0].whole > 0) == (zero >= 2)


def _bytes(of_element: tuple[int, int], elements: int) -> int:
    whole, share = of_element
    return whole * elements + share * elements // DP


def _registered(model: str, precision: str) -> int:
    """Bytes of the model's own buffers: those that are left without a data-parallel layout."""
    spec = spec_of(model, mesh={}, optimizer={"alignment": "none"}, precision={"parameters": precision})
    made = plan_again(build(model), spec)
    size = {"float32": 4, "bfloat16": 2}[precision]
    return made.memory[0].parameters - size * sum(buffer.num_elements for buffer in made.optimizer.buffers)


@pytest.mark.parametrize(
    ("buckets", "most"),
    [
        ([], 0),
        ([fills(7, 0, (1, 5))], 7),
        (
            [fills(3, 0, (1, 2)), fills(5, 1, (3, 4)), fills(2, 2, (5, 6))],
            8,
        ),  # one fills, the one before is on its way
        (
            [fills(4, 0, (0, 9)), fills(5, 1, (3, 4)), fills(2, 2, (5, 6))],
            11,
        ),  # read first and last: open throughout
        (
            [fills(3, 2, (1, 2)), fills(5, 1, (3, 4)), fills(2, 0, (5, 6))],
            10,
        ),  # none begins before the last is full
    ],
)
def test_full_gradients_are_those_that_fill_and_the_sum_on_its_way(buckets: list[Filling], most: int):
    assert most_gradients(buckets) == most


ONE, TWO = frozenset({NORM}), frozenset({MATRIX})
CHUNKS = [Apart(ONE, TWO, {MATRIX: 10, NORM: 1}), Apart(frozenset(), frozenset({OTHER}), {OTHER: 100})]


@pytest.mark.parametrize(
    ("order", "most"),
    [
        ("F0.0 B0.0 W0.0", 11),
        ("F0.0 F1.0 B0.0 B1.0 W0.0 W1.0", 11),  # the first W sums the norms of both backwards
        ("F0.0 F0.1 B0.1 B0.0 W0.1 W0.0", 101),  # a norm of one chunk waits while the other sums
        ("F0.0 F0.1 B0.1 W0.1 B0.0 W0.0", 100),
        ("F0.0 F1.0 B0.0 B1.0 W0.0 F0.1 B0.1 W1.0 W0.1", 100),  # nothing of a chunk is held beyond its W
    ],
)
def test_gradients_that_wait_are_held_until_the_next_weights_of_their_chunk(order: str, most: int):
    assert most_until_weights(_order(order), CHUNKS) == most


def test_a_bucket_that_a_weights_action_gives_nothing_opens_for_its_sum_alone():
    several = Apart(frozenset({(1, 0), (1, 1)}), TWO, {(1, 0): 5, (1, 1): 5, MATRIX: 10})
    assert most_until_weights(_order("F0.0 F1.0 B0.0 B1.0 W0.0"), [several]) == 20
    assert most_until_weights(_order("B0.0 W0.0"), [replace(several, early=frozenset())]) == 20
    apart = replace(several, sizes={(1, 0): 5, (1, 1): 5, (1, 2): 5, MATRIX: 10}, early=frozenset())
    assert most_until_weights(_order("B0.0 W0.0"), [apart]) == 20


def _order(text: str) -> Order:
    return tuple(Action(word[0], *map(int, word[1:].split("."))) for word in text.split())


# ---- weights in shards stay whole for a step if the spec leaves it to the plan and the devices have the memory


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
