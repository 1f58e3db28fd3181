from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost.memory import LocalSizes, activation_bytes, boundary_bytes, memory_of_ranks, optimizer_bytes
from planner.graph.blocks.blocks import find_blocks
from planner.graph.program import Program
from planner.pipeline.schedule import build_schedule
from planner.pipeline.simulate import simulate
from planner.pipeline.stages import StageAssignment, assign_stages
from planner.placement.types import V
from tests.models.small import (
    BATCH,
    LENGTH,
    WIDTH,
    Body,
    Layer,
    Model,
    captured,
    hugging_face,
    in_order,
    layers,
)
from tests.tools.captured import capture

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
WHOLE = LocalSizes()


def staged(program: Program, pp: int) -> StageAssignment:
    return assign_stages(program, find_blocks(program), pp)


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize(
    ("parameter", "gradient", "fixed", "shared"),
    [(HALF, HALF, 4, 16), (HALF, SINGLE, 6, 12), (SINGLE, SINGLE, 8, 8), (DOUBLE, DOUBLE, 16, 16)],
)
def test_bytes_a_parameter_are_those_of_the_zero1_table(
    parameter: torch.dtype, gradient: torch.dtype, fixed: int, shared: int, d: int
) -> None:
    program = hugging_face("gpt2")
    shapes = {fqn: program.node(name).meta["val"].shape for name, fqn in program.parameters.items()}
    num_elements = sum(shape.numel() for shape in shapes.values())
    (row,) = memory_of_ranks(
        program, staged(program, 1), 1, [1], num_shards=d, parameter_dtype=parameter, gradient_dtype=gradient
    )
    assert optimizer_bytes(parameter, gradient) == shared
    assert row.parameters + row.gradients == fixed * num_elements
    assert row.optimizer == -(-shared * num_elements // d)


def test_without_zero_every_rank_holds_the_whole_optimizer() -> None:
    program = hugging_face("gpt2")
    stages = staged(program, 1)
    (alone,) = memory_of_ranks(program, stages, 1, [1])
    (copy,) = memory_of_ranks(program, stages, 1, [1], num_shards=4, zero=0)
    assert copy.optimizer == alone.optimizer


def test_a_tied_parameter_is_held_by_both_of_its_ranks() -> None:
    program = hugging_face("gpt2")
    rows = memory_of_ranks(program, staged(program, 2), 2, [1, 1])
    (whole,) = memory_of_ranks(program, staged(program, 1), 1, [1])
    tied = 96 * WIDTH * 4
    assert sum(row.parameters for row in rows) == whole.parameters + tied


def test_frozen_parameters_have_no_gradient_and_no_optimizer() -> None:
    with torch.device("meta"):
        model = Model(layers(2)())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    program = capture(model, {"input_ids": ids, "labels": ids})
    (row,) = memory_of_ranks(program, staged(program, 1), 1, [1])
    assert row.gradients == 4 * sum(p.numel() for p in model.head.parameters())
    assert row.optimizer == 2 * row.gradients


def test_sharded_parameters_and_values_count_their_local_part() -> None:
    program = captured(layers(2))
    types = {name: V(0, program.node(name).meta["val"].shape[0]) for name in program.parameters}
    stages = staged(program, 1)
    (whole,) = memory_of_ranks(program, stages, 1, [1])
    (half,) = memory_of_ranks(program, stages, 1, [1], local=LocalSizes(2, types))
    assert half.parameters == whole.parameters // 2
    assert half.optimizer == whole.optimizer // 2
    assert half.activations == whole.activations


def test_the_first_rank_of_1f1b_holds_the_most_microbatches() -> None:
    program = captured(layers(4))
    stages = assign_stages(program, find_blocks(program), 4, split=[1, 1, 1, 1])
    in_flight = simulate(build_schedule("1f1b", 4, 8)).peak_in_flight
    rows = memory_of_ranks(program, stages, 4, in_flight)
    assert in_flight == (4, 3, 2, 1)
    one = activation_bytes(program, stages, 1, WHOLE) + boundary_bytes(program, stages, 1, WHOLE)
    assert rows[1].activations == 3 * one
    assert boundary_bytes(program, stages, 1, WHOLE) == BATCH * LENGTH * WIDTH * 4
    assert boundary_bytes(program, stages, 0, WHOLE) == 0


def measured_bytes(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes of the distinct memory that autograd saves in one forward, parameters and buffers aside."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs)
    assert loss is not None
    return sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)


@pytest.mark.parametrize("wide", [2, 4])
def test_the_estimate_of_activations_is_near_what_autograd_saves(wide: int) -> None:
    model = Model(Body(in_order, layers=nn.ModuleList(Layer(wide) for _ in range(3))))
    inputs = {name: torch.zeros(BATCH, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    program = capture(model, inputs)
    estimate = activation_bytes(program, staged(program, 1), 0, WHOLE)
    assert estimate == pytest.approx(measured_bytes(model, inputs), rel=0.1)


def test_stages_keep_together_what_one_stage_keeps() -> None:
    program = captured(layers(4))
    one, four = staged(program, 1), staged(program, 4)
    whole = activation_bytes(program, one, 0, WHOLE)
    parts = sum(activation_bytes(program, four, s, WHOLE) + boundary_bytes(program, four, s, WHOLE) for s in range(4))
    assert whole == parts
