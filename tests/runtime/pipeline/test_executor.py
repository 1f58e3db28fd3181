"""The executor on two stages of one rank: gradients, random streams, memory and errors."""

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from passes.base import StageModule
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import WeightGradients
from planner.mesh import Mesh
from planner.pipeline.schedule import Action
from runtime.distributed.faults.failure import StepError
from runtime.distributed.groups import Groups
from runtime.pipeline.executor import Executor, Step
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


WAITING = tuple(
    Action(k, m, c)
    for k, m, c in (
        *(("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("F", 1, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 0), ("W", 0, 1)),
        *(("B", 1, 0), ("W", 0, 0), ("W", 1, 1), ("W", 1, 0)),
    )
)


class Product(nn.Module):
    """A stage whose one weight takes its gradient from what a backward puts aside, as the linear op does."""

    def __init__(self, handle: WeightGradients):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64))
        self.handle = handle

    def forward(self, x):
        return _Times.apply(x, self.weight, self.handle), x > 0


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, handle):
        ctx.save_for_backward(x)
        ctx.weight, ctx.handle = weight, handle
        return x * weight

    @staticmethod
    def backward(ctx, *grads):
        (x,), grad, weight = ctx.saved_tensors, grads[0], ctx.weight

        def work(_):
            weight.grad = (0 if weight.grad is None else weight.grad) + (x * grad).sum(0)

        ctx.handle.keep(work) if ctx.handle.waits else work(None)
        return grad * weight, None, None


def waiting(handle: WeightGradients, order: tuple[Action, ...] = WAITING, **options) -> Executor:
    head = Product(handle)
    run = executor(Head(), weights=handle, **options)
    run = Executor(run.stages, order, run.transport, run.random, weights=handle, **options)
    run.stages[0] = dataclasses.replace(run.stages[0], module=head)
    return run


@pytest.mark.parametrize("order", [WAITING, ORDER], ids=["waits", "at once"])
def test_gradients_of_weights_that_wait_add_up_over_microbatches(order):
    handle, step = WeightGradients(), step_of()
    run = waiting(handle, order)
    truth, gradient = expected(step, Head())
    torch.testing.assert_close(run.run(step), truth)
    torch.testing.assert_close(run.stages[0].module.weight.grad, gradient)
    assert handle.num_waiting == 0


def test_each_w_does_what_its_own_backward_put_aside_and_the_last_of_each_chunk_is_announced():
    announced: list[bool] = []
    handle, ran = WeightGradients(), []
    run = waiting(handle, before_weights=announced.append)
    run.around = lambda action, _: _noted(ran, action, handle)
    run.run(step_of())
    assert announced == [False, False, True, True]
    waits = [count for action, count in ran if str(action) in ("B0.1", "B1.1", "B0.0", "W0.1", "W1.0")]
    assert waits == [1, 2, 3, 2, 0]


@contextlib.contextmanager
def _noted(ran, action, handle):
    yield
    ran.append((action, handle.num_waiting))


def test_a_w_that_no_order_has_is_told_at_the_end_of_the_step():
    handle = WeightGradients()
    run = waiting(handle)
    run.order = tuple(a for a in WAITING if a != Action("W", 1, 0))
    with pytest.raises(AssertionError, match="weight gradients that no W has computed"):
        run.run(step_of())


def test_a_w_twice_names_the_action():
    run = waiting(WeightGradients())
    run.order = (*WAITING, Action("W", 1, 0))
    with pytest.raises(StepError, match=r"gradients of weights \(W1\.0\)"):
        run.run(step_of())


def test_what_a_failed_step_put_aside_is_forgotten():
    handle = WeightGradients()
    run = waiting(handle, before_weights=lambda is_last: 1 / 0)
    with pytest.raises(StepError, match=r"microbatch 0, gradients of weights \(W0\.1\): ZeroDivisionError"):
        run.run(step_of())
    assert handle.num_waiting == 0


def test_evaluation_leaves_w_out():
    run = waiting(WeightGradients())
    assert run.evaluate(step_of()).item() == pytest.approx(expected(step_of(), Head())[0].item(), rel=1e-14)


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


def test_values_that_no_gradient_follows_are_sent_as_copies():
    class Static(Head):
        """Gives its values in the same memory each time, as a CUDA graph does."""

        def __init__(self):
            super().__init__()
            self.weight.requires_grad_(False)
            self.register_buffer("memory", torch.zeros(2, 3, dtype=torch.float64))

        def forward(self, x):
            return self.memory.copy_(x * self.weight), x > 0

    still, head = dataclasses.replace(VALUE, requires_grad=False), Static()
    run = executor(head)
    run.stages[0] = dataclasses.replace(run.stages[0], sends=(still, MASK))
    run.stages[1] = dataclasses.replace(run.stages[1], receives=(still, MASK))
    run.order = tuple(Action("F", m, c) for c in range(2) for m in range(2)) + ORDER[2:4] + ORDER[6:8]
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


def test_an_error_in_the_code_of_a_graph_names_the_user_s_line():
    class Broken(nn.Module):
        def forward(self, value, mask):
            return (torch.ops.aten.view.default(value, [5, 5]).sum(),)

    broken = fx.symbolic_trace(Broken())
    for line, node in enumerate(broken.graph.nodes, 1):
        node.meta["stack_trace"] = f'  File "model.py", line {line}, in forward\n    the call {node.name}\n'
    run = executor(Head())
    run.stages[1] = dataclasses.replace(run.stages[1], module=broken)
    with pytest.raises(StepError) as caught:
        run.run(step_of())
    assert str(caught.value).split("\n")[1] == "  at:  model.py:3, `the call view_default`"


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
