"""Tokens that go once to each rank, or first once to each node, of their experts train as in one process.

Ranks are threads of this process; tests/test_dump_equals_run.py runs a few of the same as processes.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from planner.tables.experts import ONCE_TO_A_NODE, ONCE_TO_A_RANK, ROWS
from tests.models import experts, hugging_face, sorted_experts
from tests.numeric.test_expert_layouts import batch_of, built, check, family
from tests.tools.captures import plan_again
from tests.tools.paths import ROOT
from tests.tools.simulated_mesh import run_mesh, spec_of

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


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("num_experts", [4, 8])
@pytest.mark.parametrize("mesh", [OVER_NODES, ONE_A_NODE], ids=str)
@pytest.mark.parametrize("way", SENDS, ids=lambda w: w.__name__)
def test_every_spelling_over_nodes(way, mesh, num_experts):
    make = lambda: built(layer_of(way, num_experts))  # noqa: E731
    check(make, mesh, cluster=NODES_OF_TWO)
    several = SENDS[way] if num_experts > 4 else ROWS
    by_node = SENDS[way].replace(ONCE_TO_A_RANK, ONCE_TO_A_NODE)
    found = sends_of(make(), batch_of(8), mesh, cluster=NODES_OF_TWO)
    assert found == {by_node if mesh is OVER_NODES else several}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("way", [experts.masks, sorted_experts.by_places], ids=lambda w: w.__name__)
def test_one_choice_and_all(way, top_k):
    mesh = {"tp": 2, "dp": 2, "ep": 4, "etp": 1}
    make = lambda: built(layer_of(way, 8, top_k))  # noqa: E731
    check(make, mesh, cluster=NODES_OF_TWO)
    expected = ROWS if top_k == 1 else ONCE_TO_A_NODE
    assert sends_of(make(), batch_of(4), mesh, cluster=NODES_OF_TWO) == {expected}


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_family_over_nodes(name, more):
    found = hugging_face.batch("mixtral")
    batch = {key: torch.cat([x, x.roll(1, 1), x.roll(2, 1), x.roll(3, 1)])[:8] for key, x in found.items()}
    check(lambda: family(name), OVER_NODES, 1e-5, batch=batch, cluster=NODES_OF_TWO, **more)


class Wide(sorted_experts.Sorting):
    """Weights of at least float32, as of most families. ``scale``: of sums before they have the rows' dtype again."""

    def __init__(self, way: sorted_experts.Way = sorted_experts.by_places, scale: float = 1.0) -> None:
        super().__init__(way)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.gate(flat).to(torch.promote_types(x.dtype, torch.float32))
        y = self.way(self, flat, *scores.softmax(-1).topk(self.top_k, -1)).view_as(x)
        return (y if self.scale == 1.0 else y * self.scale).to(x.dtype)


def in_half(dtype: torch.dtype, **given) -> nn.Module:
    return built(partial(Wide, **given)).to(torch.bfloat16).to(dtype)


def errors(
    loss: Tensor, gradients: dict[str, Tensor], truth: nn.Module, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of the loss, and of all gradients together."""
    truth.zero_grad()
    true = truth(**batch)
    true.backward()
    wrong = [(gradients[name].double() - p.grad).norm() for name, p in truth.named_parameters()]
    return (loss.double() - true.detach()).abs(), torch.stack(wrong).norm()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [sorted_experts.by_places, sorted_experts.of_named_tokens], ids=lambda w: w.__name__)
@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, OVER_NODES, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}], ids=str)
def test_wider_weights_lose_no_more_than_in_one_process(mesh, way):
    batch, make = batch_of(8), partial(in_half, torch.bfloat16, way=way)
    ran = run_mesh(make, batch, mesh, cluster=NODES_OF_TWO)
    assert all(row.sends.startswith("tokens, once") and "back" not in row.sends for row in ran.plan.experts)
    alone, truth = make(), in_half(torch.float64, way=way)
    loss = alone(**batch)
    loss.backward()
    _, by_one = errors(loss.detach(), {name: p.grad for name, p in alone.named_parameters()}, truth, batch)
    of_loss, by_ranks = errors(ran.loss, ran.gradients, truth, batch)
    assert by_ranks <= 1.5 * by_one
    assert of_loss < 2e-2


@pytest.mark.thorough
def test_sums_that_are_read_in_their_wider_dtype_return_row_by_row():
    """Rounded on the way they would be other sums."""
    given = {"precision": {"parameters": "bfloat16"}}
    found = [sends_of(in_half(torch.bfloat16, scale=x), batch_of(4), {"dp": 2, "ep": 2}, **given) for x in (1.0, 0.5)]
    assert found == [{ONCE_TO_A_RANK}, {f"{ONCE_TO_A_RANK}; rows back"}]
