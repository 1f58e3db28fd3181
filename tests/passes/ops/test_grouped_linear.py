"""Gradients of stacks of experts go into the buffer expert by expert, as autograd gives them, and make no stack."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.ops import meeting
from passes.ops.meeting import grouped_linear
from passes.ops.weight_gradients import Add, WeightGradients, add_products
from planner import plan
from planner.lower import lower
from tests.models import experts, stacked_experts
from tests.numeric.test_expert_layouts import batch_of, built, layer_of
from tests.passes.ops.test_meeting import EXPERTS, WIDTH, met
from tests.tools.ranks import Ranks
from tests.tools.simulated_mesh import spec_of

WIDE = 2 * WIDTH
PRODUCTS = (grouped_linear, meeting.grouped_mm)


class Buffer:
    """The buffer of one stack, as the runtime sums it."""

    def __init__(self, stack: nn.Parameter, dtype: torch.dtype) -> None:
        self.stack, self.main = stack, torch.full(stack.shape, 7.0, dtype=dtype)
        self.is_fresh, self.num = True, 0

    def place_of(self, parameter: Tensor) -> Buffer | None:
        return self if parameter is self.stack else None

    def _take(self) -> bool:
        fresh, self.is_fresh = self.is_fresh, False
        self.num += 1
        return fresh

    def add(self, add: Add, *values: Any) -> None:
        add(self.main, *values, is_fresh=self._take())

    def add_nothing(self) -> None:
        self.num += 1


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that an op makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given]
        self.largest = max([self.largest, *(x.nbytes for x in new)])
        return result


def given(transposed: bool, dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, meeting.Meeting]:
    ((rows, here),) = Ranks(1).run(lambda rank: met(rank, 1, 1))
    torch.manual_seed(1)
    shape = (EXPERTS, WIDE, WIDTH) if transposed else (EXPERTS, WIDTH, WIDE)
    return rows.detach().to(dtype), nn.Parameter(torch.randn(shape).to(dtype)), here


def by_autograd(rows: Tensor, stack: Tensor, here: meeting.Meeting, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, w = rows.clone().requires_grad_(), stack.detach().clone().requires_grad_()
    y = meeting.grouped_mm(x, w.transpose(1, 2) if transposed else w, here)
    return y.detach(), *torch.autograd.grad(y, (x, w), y.detach())


BFLOAT16 = torch.bfloat16, torch.float32
CASES = [(torch.float64, torch.float64, False), (*BFLOAT16, False), (*BFLOAT16, True)]  # the one call has no float64


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "main", "is_one_call"), CASES, ids=["float64", "bfloat16", "one call"])
def test_two_microbatches_add_to_the_buffer_what_autograd_gives(
    transposed: bool, dtype: torch.dtype, main: torch.dtype, is_one_call: bool, monkeypatch: pytest.MonkeyPatch
):
    rows, stack, here = given(transposed, dtype)
    y, of_rows, of_stack = by_autograd(rows, stack, here, transposed)
    if is_one_call:
        monkeypatch.setattr(meeting, "has_grouped_kernel", lambda device: True)
    handle, buffer = WeightGradients(), Buffer(stack, main)
    handle.bind(buffer)
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for times in (1, 2):
        x = rows.clone().requires_grad_()
        found = grouped_linear(x, stack, here, transposed, handle)
        found.backward(y)
        torch.testing.assert_close(found.detach(), y)
        torch.testing.assert_close(x.grad, of_rows)
        torch.testing.assert_close(buffer.main, times * of_stack.to(main), **near)
    assert buffer.num == 2
    assert stack.grad is None


class OnHopper:
    """The grouped product with the rules of its kernel: strides and addresses of groups are multiples of 16 bytes, and
    of a group without rows nothing is written. ``num``: how often it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        monkeypatch.setattr(meeting, "has_grouped_kernel", lambda device: True)
        monkeypatch.setattr(torch.nn.functional, "grouped_mm", self)

    def __call__(self, a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        self.num += 1
        torch._grouped_mm(a.to("meta"), b.to("meta"), offs=offs.to("meta"))  # torch's own checks of strides
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        ends = [0, *offs.tolist()]
        sizes = [stop - start for start, stop in pairwise(ends)]
        if b.dim() == 3:
            assert a.stride(-1) == 1 or all(size % 8 == 0 for size in sizes)
            return torch.cat([x @ w for x, w in zip(a.split(sizes), b, strict=True)])
        along = [x for x, step in ((a, a.stride(1)), (b, b.stride(0))) if step == 1]  # groups move along such dims
        assert not along or all(size > 0 and size % 8 == 0 for size in sizes)
        made = torch.full((len(sizes), a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype)
        for part, x, y in zip(made, a.split(sizes, 1), b.split(sizes), strict=True):
            if len(y):
                part.copy_(x @ y)
        return made


COUNTS = [[0, 7, 9, 3], [8, 0, 0, 8], [0, 19, 0, 0], [0, 0, 1, 0], [6, 6, 6, 6]]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_all_three_products_are_one_call_of_the_kernel_each_whatever_the_counts(
    counts: list[int], transposed: bool, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(2)
    here: Any = SimpleNamespace(sizes=counts, counts=torch.tensor(counts))
    shape = (len(counts), WIDE, WIDTH) if transposed else (len(counts), WIDTH, WIDE)
    rows, stack = torch.randn(sum(counts), WIDTH).bfloat16(), nn.Parameter(torch.randn(shape).bfloat16())
    y, of_rows, of_stack = by_autograd(rows, stack, here, transposed)
    kernel, handle, buffer = OnHopper(monkeypatch), WeightGradients(), Buffer(stack, torch.float32)
    handle.bind(buffer)
    x = rows.clone().requires_grad_()
    found = grouped_linear(x, stack, here, transposed, handle)
    found.backward(y)
    assert kernel.num == 3
    for mine, other in ((found, y), (x.grad, of_rows), (buffer.main, of_stack.float())):
        torch.testing.assert_close(mine, other)
    assert not buffer.main[here.counts == 0].any()
    for one, other in zip(by_autograd(rows, stack, here, transposed), (y, of_rows, of_stack), strict=True):
        torch.testing.assert_close(one, other)
    assert kernel.num == 6


def test_no_tensor_of_the_size_of_the_stack_is_made():
    rows, stack, _ = given(False, torch.float32)
    here: Any = SimpleNamespace(sizes=[1] * EXPERTS)
    rows = rows[:EXPERTS].requires_grad_()
    handle, buffer = WeightGradients(), Buffer(stack, torch.float32)
    largest, y = [], rows
    for _ in range(2):  # autograd's, then ours
        y = grouped_linear(rows, stack, here, False, handle)
        with Made() as made:
            y.backward(torch.ones_like(y))
        largest.append(made.largest)
        handle.bind(buffer)
    assert largest == [stack.nbytes, y.nbytes]
    torch.testing.assert_close(buffer.main, stack.grad)


def test_an_expert_without_rows_has_zeros_in_its_part_of_a_fresh_buffer():
    main = torch.full((2, 3, 4), 7.0)
    rows, grad = torch.randn(5, 3), torch.randn(5, 4)
    add_products(main, [part.t() for part in rows.split([5, 0])], grad.split([5, 0]), is_fresh=True)
    torch.testing.assert_close(main, torch.stack([rows.t() @ grad, torch.zeros(3, 4)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [experts.stacked, experts.looked_up, *stacked_experts.WAYS], ids=lambda w: w.__name__)
def test_stacks_of_experts_with_axes_of_their_own_know_their_buffer(way: Any):
    model = built(partial(layer_of, way))
    (stage,) = lower(plan(model, spec_of(batch_of(4), {"dp": 2, "ep": 2})), 0).stages
    num = {target: len(stage.module.graph.find_nodes(op="call_function", target=target)) for target in PRODUCTS}
    assert num[grouped_linear] >= 1
    assert num[grouped_linear] + num[meeting.grouped_mm] == 2  # of pairs of stacks one is made of two parameters
