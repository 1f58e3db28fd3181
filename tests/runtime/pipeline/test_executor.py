"""The executor on two stages of one rank: gradients, random streams, memory and errors."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from passes.ops.random_state import RandomState
from passes.stage_module import StageModule
from planner.mesh import Mesh
from planner.pipeline.schedule import Action
from runtime.distributed.groups import Groups
from runtime.pipeline.executor import Executor, Step, StepError
from runtime.pipeline.p2p import Transport
from tests.tools.handmade_stages import boundary

VALUE = boundary("value", (2, 3), torch.float64)
MASK = boundary("mask", (2, 3), torch.bool, requires_grad=False)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight, x > 0


class Tail(nn.Module):
    def forward(self, value, mask):
        return ((value * mask).square().sum(),)


def stage(module: nn.Module, index: int, **changes) -> StageModule:
    first = StageModule(0, 0, fx.symbolic_trace(module), (), (VALUE, MASK), ("x",), (), (), (), {}, False)
    if index == 1:
        first = dataclasses.replace(first, index=1, chunk=1, receives=(VALUE, MASK), sends=(), inputs=(), has_loss=True)
    return dataclasses.replace(first, **changes)


ORDER = tuple(Action(k, m, c) for m in range(2) for k, c in (("F", 0), ("F", 1), ("B", 1), ("B", 0)))


def executor(head: nn.Module, tail: nn.Module | None = None, random: RandomState | None = None, **options) -> Executor:
    groups = Groups(Mesh(), 0, torch.device("cpu"), None)  # pyright: ignore[reportArgumentType]
    stages = [stage(head, 0), stage(tail or Tail(), 1)]
    return Executor(stages, ORDER, Transport(groups, 2), random or RandomState(0, 0), **options)


def step_of(scale: float = 1.0) -> Step:
    torch.manual_seed(0)
    return Step(7, [{"x": torch.randn(2, 3, dtype=torch.float64)} for _ in range(2)], 4, (), torch.tensor(scale))


def expected(step: Step, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    weight = head.weight.detach().requires_grad_()
    loss = sum(((m["x"] * weight) * (m["x"] > 0)).square().sum() for m in step.microbatches)
    loss.backward()
    return loss.detach(), weight.grad


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_losses_and_gradients_add_up_over_microbatches(scale):
    head, step = Head(), step_of(scale)
    run = executor(head)
    loss = run.run(step)
    truth, gradient = expected(step, head)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(run.stages[0].module.get_parameter("weight").grad, gradient * scale)


def test_each_forward_draws_from_the_stream_of_its_global_microbatch():
    class Recording(RandomState):
        def begin(self, step, microbatch):
            begun.append((step, microbatch))

    begun: list[tuple[int, int]] = []
    executor(Head(), random=Recording(0, 0)).run(step_of())
    assert begun == [(7, 4), (7, 4), (7, 5), (7, 5)]


def test_the_last_backward_of_each_chunk_is_announced():
    announced: list[bool] = []
    executor(Head(), before_backward=announced.append).run(step_of())
    assert announced == [False, False, True, True]


def test_evaluate_leaves_no_gradient_and_gives_the_same_loss():
    head, step = Head(), step_of()
    run = executor(head)
    assert run.evaluate(step).item() == pytest.approx(expected(step, head)[0].item(), rel=1e-14)
    assert run.stages[0].module.get_parameter("weight").grad is None


def test_a_boundary_that_nothing_reads_sends_zeros_back():
    class Deaf(nn.Module):
        def forward(self, value, mask):
            return (mask.to(torch.float64).sum(),)

    run = executor(Head(), Deaf())
    run.run(step_of())
    assert run.stages[0].module.get_parameter("weight").grad.tolist() == [0, 0, 0]


def test_a_stage_without_trainable_parameters_runs():
    head = Head()
    head.weight.requires_grad_(False)
    run = executor(head)
    truth = sum(((m["x"] * head.weight) * (m["x"] > 0)).square().sum() for m in step_of().microbatches)
    assert run.run(step_of()).item() == pytest.approx(truth.item(), rel=1e-14)


def test_activations_are_freed_by_their_backward():
    kept: list[weakref.ref] = []

    class Watched(nn.Module):
        def forward(self, value, mask):
            kept.append(weakref.ref(value))
            return ((value * mask).square().sum(),)

    run = executor(Head())
    run.stages[1] = dataclasses.replace(run.stages[1], module=Watched())
    run.run(step_of())
    gc.collect()
    assert len(kept) == 2
    assert all(reference() is None for reference in kept)


def test_an_error_names_rank_stage_step_microbatch_and_action():
    class Broken(nn.Module):
        def forward(self, value, mask):
            return (value.view(5, 5).sum(),)

    with pytest.raises(StepError) as caught:
        executor(Head(), Broken()).run(step_of())
    assert str(caught.value).startswith(
        "rank 0 (tp 0 · pp 0 · dp 0), stage 1, step 7, microbatch 0, forward (F0.1): RuntimeError: "
    )


def test_an_error_shows_its_place_in_the_schedule():
    class SecondBreaks(nn.Module):
        def forward(self, value, mask):
            seen.append(value)
            return (value.view(*value.shape, len(seen) % 2).sum(),)

    seen: list[torch.Tensor] = []
    run = executor(Head())
    run.stages[1] = dataclasses.replace(run.stages[1], module=SecondBreaks())
    with pytest.raises(StepError) as caught:
        run.run(step_of())
    assert_expected_inline(
        str(caught.value).partition("\n")[2],
        """\
  its place in the schedule of all pp ranks:
  step  rank0
  0     F0.0
  1     F0.1
  2     B0.1
  3     B0.0
  4     F1.0
  5     >F1.1<
  6     B1.1
  7     B1.0""",
    )
    seen.clear()
    with pytest.raises(StepError) as caught:
        run.evaluate(step_of())
    assert_expected_inline(
        str(caught.value).partition("\n")[2],
        """\
  its place in the schedule of all pp ranks:
  step  rank0
  0     F0.0
  1     F0.1
  2     F1.0
  3     >F1.1<""",
    )


def test_a_run_after_a_failed_one_starts_clean():
    class Once(nn.Module):
        def forward(self, value, mask):
            if not failed:
                failed.append(True)
                raise RuntimeError("once")
            return ((value * mask).square().sum(),)

    failed: list[bool] = []
    head, step = Head(), step_of()
    run = executor(head)
    run.stages[1] = dataclasses.replace(run.stages[1], module=Once())
    with pytest.raises(StepError, match="once"):
        run.run(step)
    assert run.run(step).item() == pytest.approx(expected(step, head)[0].item(), rel=1e-14)
