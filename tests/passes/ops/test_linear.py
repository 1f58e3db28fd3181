"""A product whose weight has a place: the same gradients, added where they belong, at once or when it is asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import part
from passes.ops.linear import column_linears, gathered_linears, linear
from passes.ops.weight_gradients import Add, AtOnce, WeightGradients
from passes.types.types import V
from tests.tools.ranks import Ranks

pytestmark = pytest.mark.check


class Sums:
    """Places of what it is given: each sums what comes."""

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = {id(p): p for p in parameters}
        self.times = {id(p): 0 for p in parameters}
        self.sums = {id(p): torch.zeros_like(p) for p in parameters}

    def place_of(self, parameter: Tensor):
        return Sum(self, id(parameter)) if id(parameter) in self.parameters else None

    def of(self, parameter: Tensor) -> Tensor:
        return self.sums[id(parameter)]


class Sum:
    def __init__(self, sums: Sums, key: int) -> None:
        self.sums, self.key = sums, key

    def add(self, add: Add, *values: Tensor) -> None:
        self.add_nothing()
        add(self.sums.sums[self.key], *values, is_fresh=False)

    def add_nothing(self) -> None:
        self.sums.times[self.key] += 1


def tensors(shape: tuple[int, ...], transposed: bool, has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
        for size in (shape, (6, 4) if transposed else (4, 6), (4,))
    )
    return x, weight, bias if has_bias else None


def bound(*parameters: Tensor | None) -> tuple[WeightGradients, Sums]:
    handle, sums = WeightGradients(), Sums(*(p for p in parameters if p is not None and p.requires_grad))
    handle.bind(sums)
    return handle, sums


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = F.linear(leaves[0], leaves[1].t() if transposed else leaves[1], *leaves[2:])
    return y.detach(), list(torch.autograd.grad(y.sin().sum(), leaves))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "transposed"), [((3, 6), True), ((3, 6), False), ((2, 3, 6), False), ((2, 2, 3, 6), False)]
)
def test_gradients_are_those_of_autograd_and_lie_in_their_places(shape, transposed, has_bias, waits):
    x, weight, bias = tensors(shape, transposed, has_bias)
    handle, sums = bound(weight, bias)
    value, gradients = expected(x, weight, bias, transposed)
    with handle.put_aside((0, 0) if waits else None):
        y = linear(x, weight, bias, transposed, handle)
        y.sin().sum().backward()
    torch.testing.assert_close(y.detach(), value, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x.grad, gradients[0], rtol=1e-14, atol=1e-14)
    if waits:
        assert sums.of(weight).count_nonzero() == 0
        handle.run((0, 0))
    held = [weight] if bias is None else [weight, bias]
    for parameter, gradient in zip(held, gradients[1:], strict=True):
        torch.testing.assert_close(sums.of(parameter), gradient, rtol=1e-12, atol=1e-12)
        assert parameter.grad is None
        assert sums.times[id(parameter)] == 1


def test_a_value_that_lies_scattered_in_memory_is_read_as_it_is():
    x, weight, bias = tensors((2, 6, 3), False, True)
    handle, sums = bound(weight, bias)
    scattered = x.transpose(1, 2)
    _, gradients = expected(scattered, weight, bias, False)
    linear(scattered, weight, bias, False, handle).sin().sum().backward()
    torch.testing.assert_close(x.grad.transpose(1, 2), gradients[0])
    torch.testing.assert_close(sums.of(weight), gradients[1])


def test_what_it_makes_may_be_summed_over_ranks_where_it_lies():
    x, weight, bias = tensors((2, 3, 6), False, True)
    y = linear(x, weight, bias, False, bound(weight, bias)[0])
    y.mul_(2.0).sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * weight.detach().sum(0).expand(2, 3, 6))


@pytest.mark.parametrize("handle", [None, WeightGradients(), AtOnce(WeightGradients())], ids=["none", "unbound", "in"])
def test_without_places_gradients_are_autograds(handle):
    x, weight, bias = tensors((2, 3, 6), False, True)
    linear(x, weight, bias, False, handle).sin().sum().backward()
    for leaf, gradient in zip((x, weight, bias), expected(x, weight, bias, False)[1], strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_a_frozen_weight_costs_no_product_and_keeps_no_input():
    x, weight, bias = tensors((2, 3, 6), False, True)
    weight.requires_grad_(False)
    handle, sums = bound(bias)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x, weight, bias, False, handle)
    assert kept == []
    y.sum().backward()
    torch.testing.assert_close(sums.of(bias), torch.full((4,), 6.0, dtype=torch.float64))


def test_a_value_without_a_gradient_leaves_its_product_to_autograd():
    x, weight, bias = tensors((3, 6), False, True)
    handle, sums = bound(weight, bias)
    with handle.put_aside((0, 0)):
        linear(x.detach(), weight, bias, False, handle).sum().backward()
    assert weight.grad is not None
    assert sums.times[id(weight)] == 0


def test_a_weight_read_twice_gets_both_contributions():
    x, *_ = tensors((3, 6), True, False)
    square = torch.randn(6, 6, dtype=torch.float64).requires_grad_()
    handle, sums = bound(square)
    linear(linear(x, square, None, True, handle), square, None, True, handle).sum().backward()
    leaf = square.detach().clone().requires_grad_()
    (x.detach() @ leaf @ leaf).sum().backward()
    torch.testing.assert_close(sums.of(square), leaf.grad)
    assert sums.times[id(square)] == 2


def test_of_products_over_one_value_that_nothing_came_back_to_is_told_too():
    x, first, _ = tensors((3, 6), True, False)
    second = torch.randn(6, 5, dtype=torch.float64).requires_grad_()
    handle, sums = bound(first, second)
    axis = AxisHandle("tp", 1, 0)
    column_linears(x, axis, True, [first, second], [None, None], handle)[0].sum().backward()
    assert (sums.times[id(first)], sums.times[id(second)]) == (1, 1)
    assert sums.of(second).count_nonzero() == 0


@pytest.mark.parametrize("again", [False, True])
def test_products_that_exchange_wait_and_gather_where_their_weights_run(again):
    def run(rank: int) -> list[tuple[Tensor, Tensor, Tensor, dict]]:
        found = []
        for waits in (False, True):
            axis, cut = AxisHandle("tp", 2, rank), V(0, 6)
            whole, weight, bias = tensors((6, 6), True, True)
            own = part(whole.detach(), cut, 2, rank).clone().requires_grad_()
            handle, sums = bound(weight, bias)
            with handle.put_aside((0, 0) if waits else None):
                gathered_linears(own, axis, cut, again, True, [weight], [bias], handle)[0].sin().sum().backward()
            assert axis.counts["all_gather", "backward"] == (again and not waits)
            if waits:
                handle.run((0, 0))
            found.append((own.grad, sums.of(weight), sums.of(bias), dict(axis.counts)))
        return found

    for at_once, later in Ranks(2).run(run):
        assert all(torch.equal(a, b) for a, b in zip(at_once[:3], later[:3], strict=True))
        assert {k: n for k, n in at_once[3].items() if n} == {k: n for k, n in later[3].items() if n}


def test_in_a_captured_region_nothing_waits():
    x, weight, _ = tensors((3, 6), False, False)
    handle, sums = bound(weight)
    with handle.put_aside((0, 0)):
        linear(x, weight, None, False, AtOnce(handle)).sum().backward()
    assert sums.times[id(weight)] == 1
    handle.run((0, 0))
    assert sums.times[id(weight)] == 1
