"""Which gathered values are gathered again: those that products with weights alone read, inside one region or none."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from passes.types.types import R
from planner import Plan
from planner.cost.planned import cut_work
from planner.spec.spec import Spec
from planner.tables.parameters import gathered_values
from planner.trace.lowered import Lowered
from tests.tools.captures import plan_again

WIDTH, LENGTH = 16, 8


class Block(nn.Module):
    """A gated MLP; ``peek``: what the linears read is read by another op, too."""

    def __init__(self, peek: bool, is_frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down, self.peek = nn.Linear(4 * WIDTH, WIDTH), peek
        for linear in (self.gate, self.up) if is_frozen else ():
            linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        more = h.cumsum(1) if self.peek else 0.0
        return x + self.down(F.silu(self.gate(h)) * self.up(h)) + more


class Model(nn.Module):
    def __init__(self, peek: bool = False, is_frozen: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(peek, is_frozen) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(model: nn.Module, **rest: Any) -> Plan:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 32}
    spec = {"mesh": {"tp": 2}, "batch": {"global": 2, "micro": 2}, "inputs": {"input_ids": ids, "labels": ids}}
    return plan_again(model, spec | {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}} | rest)


def gathers(made: Plan) -> list[bool]:
    """Of each value that is gathered forward and summed backward: whether it is gathered again."""
    return [again for _, again in gathered_values(Lowered(*made.to_run(), made.regions), 0)]


@pytest.mark.thorough
def test_what_linears_alone_read_is_gathered_again_and_the_plan_says_what_that_saves():
    made = planned(Model())
    assert gathers(made) == [True] * 3
    backward = [row for row in made.collectives if (row.kind, row.phase) == ("all_gather", "backward")]
    whole = 2 * LENGTH * WIDTH * 4
    assert sum(row.bytes * row.count for row in backward) >= 3 * whole
    (note,) = [row.what for row in made.diagnostics if row.where == "tensor_parallel.regather"]
    assert note == (
        "stage 0 gathers the inputs of 3 groups of linears again in the backward: per microbatch, 1.50 KiB are not "
        "saved and 3.00 KiB gathered again"
    )


def test_what_another_op_reads_too_is_kept_and_told():
    made = planned(Model(peek=True))
    assert gathers(made) == [False, False, True]
    kept = [row for row in made.diagnostics if "is saved for the backward" in row.what]
    assert len(kept) == 2
    assert all("test_regather.py" in row.where for row in kept)


def test_frozen_linears_read_nothing_in_the_backward():
    assert gathers(planned(Model(is_frozen=True))) == [False, False, True]


def test_the_spec_may_keep_everything():
    made = planned(Model(), tensor_parallel={"sequence_parallel": True, "regather": False, "vocabulary_multiple": 8})
    assert gathers(made) == [False] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [["mlp"], []])
def test_linears_of_one_region_are_gathered_for_inside_of_it(scope):
    made = planned(Model(), cuda_graphs={"impl": "emulate", "scope": scope})
    assert gathers(made) == [True] * 3
    assert not any(placement == R for region in made.regions for _, placement in region.outputs)


def test_in_the_backward_the_gather_overlaps_the_gradient_of_the_value_and_its_sum_those_of_the_weights():
    plan = planned(Model())
    work = cut_work(*plan.to_run(), Spec.load(plan.spec), ("none",))
    beside = {
        (message.kind, op.sides)
        for unit in work.units
        for message, _ in unit.work.backward.messages
        for op in message.beside
        if op.sides
    }
    of_values = {("all_gather", (1, LENGTH, WIDTH, features)) for features in (16, 32)}
    assert beside == of_values | {("reduce_scatter", (1, WIDTH, features, LENGTH)) for features in (16, 32)}
