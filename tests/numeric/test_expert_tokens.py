"""Tokens that go once to each rank, or first once to each node, of their experts train as in one process.

Ranks are threads of this process; tests/test_dump_equals_run.py runs a few of the same as processes.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from planner.tables.experts import ONCE_TO_A_NODE, ONCE_TO_A_RANK, ROWS
from tests.models import experts, hugging_face, sorted_experts
from tests.numeric.test_expert_layouts import batch_of, built, check, family
from tests.tools.captures import plan_again
from tests.tools.paths import ROOT
from tests.tools.simulated_mesh import spec_of

NODES_OF_TWO = str(ROOT / "tests/models/nodes_of_two.yaml")
OVER_NODES = {"dp": 4, "ep": 4}
ONE_A_NODE = {"tp": 2, "dp": 4, "ep": 4, "etp": 2}  # of ep; beside it is the other part of its experts

SENDS = {  # spelling: what travels if ranks have several experts
    experts.masks: ONCE_TO_A_RANK,
    experts.picked: ONCE_TO_A_RANK,
    experts.stacked: ONCE_TO_A_RANK,
    sorted_experts.by_places: ONCE_TO_A_RANK,
    sorted_experts.added: ONCE_TO_A_RANK,
    sorted_experts.of_named_tokens: ONCE_TO_A_RANK,
    sorted_experts.first_twice: f"{ONCE_TO_A_RANK}; rows back",  # what is summed are not the rows of a token
    sorted_experts.repeated: ROWS,  # each copy is weighted before
}


def layer_of(way, num_experts: int, top_k: int = 2):
    is_sorting = way in (*sorted_experts.WAYS, sorted_experts.first_twice)
    layer = sorted_experts.Sorting if is_sorting else experts.Layer
    return partial(layer, way, num_experts=num_experts, top_k=top_k)


def sends_of(model, batch, mesh, **given) -> set[str]:
    return {row.sends for row in plan_again(model, spec_of(batch, mesh, **given)).experts}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_experts", [4, 8])
@pytest.mark.parametrize("mesh", [OVER_NODES, ONE_A_NODE], ids=str)
@pytest.mark.parametrize("way", SENDS, ids=lambda w: w.__name__)
def test_every_spelling_over_nodes(way, mesh, num_experts):
    make = lambda: built(layer_of(way, num_experts))  # noqa: E731
    check(make, batch_of(8), mesh, 1e-10, 1e-10, cluster=NODES_OF_TWO)
    several = SENDS[way] if num_experts > 4 else ROWS
    by_node = SENDS[way].replace(ONCE_TO_A_RANK, ONCE_TO_A_NODE)
    found = sends_of(make(), batch_of(8), mesh, cluster=NODES_OF_TWO)
    assert found == {by_node if mesh is OVER_NODES else several}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("way", [experts.masks, sorted_experts.by_places], ids=lambda w: w.__name__)
def test_one_choice_and_all(way, top_k):
    mesh = {"tp": 2, "dp": 2, "ep": 4, "etp": 1}
    make = lambda: built(layer_of(way, 8, top_k))  # noqa: E731
    check(make, batch_of(4), mesh, 1e-10, 1e-10, cluster=NODES_OF_TWO)
    expected = ROWS if top_k == 1 else ONCE_TO_A_NODE
    assert sends_of(make(), batch_of(4), mesh, cluster=NODES_OF_TWO) == {expected}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_family_over_nodes(name, more):
    found = hugging_face.batch("mixtral")
    batch = {key: torch.cat([x, x.roll(1, 1), x.roll(2, 1), x.roll(3, 1)])[:8] for key, x in found.items()}
    check(lambda: family(name), batch, OVER_NODES, 1e-5, 1e-5, cluster=NODES_OF_TWO, **more)


def test_weights_of_another_dtype_than_the_rows_return_row_by_row():
    """Sums would be in the greater of both. The weights of Mixtral are float32, those of Qwen have the rows' dtype."""
    batch = {key: x.repeat(4, 1)[:8] for key, x in hugging_face.batch("mixtral").items()}
    given = {"precision": {"parameters": "bfloat16"}}
    found = {name: sends_of(family(name), batch, {"dp": 4, "ep": 2}, **given) for name in ("mixtral", "qwen3_moe")}
    assert found == {"mixtral": {f"{ONCE_TO_A_RANK}; rows back"}, "qwen3_moe": {ONCE_TO_A_RANK}}
