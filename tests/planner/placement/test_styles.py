"""Every override of every layer is planned, and then equal to one process, or refused with what it can be instead."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT
from planner import Plan, PlanError, plan
from planner.lower import lower
from planner.spec.sections import STYLES
from tests.tools.simulated_ranks import assert_equals_one_process, built, num_collectives, over_tp, planned

VOCABULARY, LENGTH, WIDTH = 64, 8, 16


def gpt() -> nn.Module:
    """Four blocks; the head's weight is the embedding's."""
    return GPT(VOCABULARY, LENGTH, WIDTH, num_layers=4, num_heads=2)


def tokens(*names: str, high: int = VOCABULARY) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(high, (2, LENGTH), generator=generator) for name in names}


def gpt_batch() -> dict[str, Tensor]:
    return tokens("input_ids", "targets")


class Experts(nn.Module):
    """Gated experts whose matrices are stacked, and a matrix that nothing reads."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.up, self.down = (nn.Parameter(torch.randn(num_experts, WIDTH, WIDTH)) for _ in range(2))
        self.gate, self.unread = nn.Linear(WIDTH, num_experts), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = torch.einsum("bsi,eio->ebso", x, self.up).relu()
        y = torch.einsum("ebso,eoi->ebsi", y, self.down)
        x = x + (y * self.gate(x).softmax(-1).permute(2, 0, 1).unsqueeze(-1)).sum(0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def styles(made: Plan, ending: str) -> list[str]:
    return [p.style for p in made.parameters if p.name.endswith(ending)]


def refusal(make: Callable[[], nn.Module], overrides: dict[str, str], batch: dict[str, Tensor]) -> str:
    with pytest.raises(PlanError) as caught:
        planned(make, batch, 2, overrides)
    return str(caught.value)


POSSIBLE = {
    "*.up": ("column", "row", "replicate"),
    "*.mlp.*": ("column", "row", "replicate"),
    "*.norm1": ("replicate",),
    "*.up.bias": ("column", "replicate"),
    "tokens": ("column", "row", "vocab", "replicate"),
    "head": ("column", "row", "vocab", "replicate"),
    "positions": ("column", "vocab", "replicate"),
    "blocks.[02].mlp.down": ("column", "row", "replicate"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", POSSIBLE)
def test_an_override_is_planned_and_equal_or_refused_with_what_it_can_be(pattern):
    for style in STYLES:
        if style in POSSIBLE[pattern]:
            made = assert_equals_one_process(gpt, gpt_batch(), 2, {pattern: style})
            decided = [p for p in made.parameters if p.origin == f"tensor_parallel.overrides.{pattern}"]
            assert {p.style for p in decided} >= {style}
            assert {p.style for p in decided if len(p.shape) > 1} <= {style}
        else:
            told = refusal(gpt, {pattern: style}, gpt_batch())
            assert f" cannot be {style}: " in told
            assert "it can be" in told
            assert f"tensor_parallel.overrides.{pattern}" in told


@pytest.mark.thorough
def test_a_style_of_every_block_needs_no_more_than_the_solver():
    overrides = {"*.up": "column", "*.down": "row", "*.qkv": "column", "*.out": "row", "tokens": "vocab"}
    asked, free = planned(gpt, gpt_batch(), 2, overrides), planned(gpt, gpt_batch(), 2)
    assert [(p.name, p.style, p.dim) for p in asked.parameters] == [(p.name, p.style, p.dim) for p in free.parameters]
    assert num_collectives(asked) == num_collectives(free)


def test_blocks_with_an_override_of_their_own_are_a_kind_of_their_own():
    made = assert_equals_one_process(gpt, gpt_batch(), 2, {"blocks.[13].mlp.up": "row", "blocks.2.mlp.*": "replicate"})
    assert styles(made, "mlp.up.weight") == ["column", "row", "replicate", "row"]
    assert styles(made, "attention.qkv.weight") == ["column"] * 4


def test_the_last_glob_that_names_a_parameter_decides():
    made = assert_equals_one_process(gpt, gpt_batch(), 2, {"*.mlp.*": "replicate", "blocks.1.mlp.*": "column"})
    assert styles(made, "mlp.up.weight") == ["replicate", "column", "replicate", "replicate"]
    assert [p.origin for p in made.parameters if p.name == "blocks.1.mlp.up.weight"] == [
        "tensor_parallel.overrides.blocks.1.mlp.*"
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        {"tokens": "vocab", "head": "replicate"},  # one tied weight
        {"blocks.1.mlp.up": "column", "*.up": "row"},
    ],
)
def test_a_glob_that_later_ones_take_everything_from_is_refused(overrides):
    told = refusal(gpt, overrides, gpt_batch())
    assert "has no effect" in told
    assert "write the narrower glob last" in told


def test_equal_wishes_in_two_globs_are_one():
    made = planned(gpt, gpt_batch(), 2, {"blocks.1.mlp.up": "row", "*.up": "row"})
    assert set(styles(made, "mlp.up.weight")) == {"row"}


@pytest.mark.thorough
def test_the_matrices_of_a_stack_go_to_ranks():
    made = assert_equals_one_process(Experts, tokens("ids", "labels", high=50), 2, {"up": "expert", "down": "expert"})
    assert [(p.style, p.dim) for p in made.parameters if p.name in ("up", "down")] == [("expert", 0)] * 2


def test_a_parameter_that_does_not_reach_the_loss_takes_no_style():
    batch = tokens("ids", "labels", high=50)
    assert "does not reach the loss" in refusal(Experts, {"unread": "column"}, batch)
    assert styles(planned(Experts, batch, 2, {"unread": "replicate"}), "unread.weight") == ["replicate"]
    assert styles(planned(Experts, batch, 2, {"*.weight": "column"}), "unread.weight") == ["replicate"]


def test_a_size_that_does_not_divide_is_named():
    told = refusal(lambda: Experts(3), {"up": "expert"}, tokens("ids", "labels", high=50))
    assert "dim 0 = 3 not divisible by tp = 2, nearest valid tp: 1, 3" in told


@pytest.mark.thorough
@pytest.mark.parametrize("overrides", [{"*.up": "row", "head": "row"}, {"*.qkv": "replicate", "*.down": "column"}])
@pytest.mark.parametrize("changes", [{"mesh": {"tp": 2, "pp": 2}}, {"tensor_parallel": {"sequence_parallel": True}}])
def test_overrides_are_lowered_on_every_stage_and_with_the_sequence_cut(overrides, changes):
    spec = over_tp(gpt_batch(), 2, overrides)
    spec = {**spec, **changes, "tensor_parallel": {**spec["tensor_parallel"], **changes.get("tensor_parallel", {})}}
    made = plan(built(gpt), {**spec, "batch": {"global": 4, "micro": 2}})
    assert all(lower(made, rank, thorough=True).stages for rank in range(made.mesh.world_size))


def test_one_rank_decides_nothing():
    made = planned(gpt, gpt_batch(), 1, {"*.up": "row", "*.norm1": "column"})
    assert {(p.style, p.origin) for p in made.parameters} == {("replicate", "default")}
