"""Products behind an f or a gather, as one op: the same numbers, exchanges start before the weights' gradients."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from passes.ops.axis import AxisHandle
from passes.ops.collectives import f, gather, part
from passes.ops.linear import column_linears, gathered_linears
from passes.types.types import Placement, V
from tests.tools.ranks import Ranks


def operands(transposed: bool, has_bias: bool, rank: int) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """x, which all ranks have, and two weights of this rank."""
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(rank + 1)
    shapes = [(6, 4), (6, 5)] if transposed else [(4, 6), (5, 6)]
    weights = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    biases = [torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for n in (4, 5)]
    flat = x.view(-1, 6) if transposed else x
    return flat.clone().requires_grad_(), weights, [*biases] if has_bias else [None, None]


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    sum((output.sin().sum() for output in outputs), torch.zeros(())).backward()
    return [leaf.grad for leaf in leaves]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_f_and_the_products_behind_it(transposed, has_bias):
    def run(rank: int) -> tuple[list[list[Tensor]], AxisHandle]:
        axis, found = AxisHandle("tp", 2, rank), []
        for fused in (True, False):
            x, weights, biases = operands(transposed, has_bias, rank)
            if fused:
                outputs = column_linears(x, axis, transposed, weights, biases)
            else:
                summed = f(x, axis)
                matrices = [w.t() if transposed else w for w in weights]
                outputs = tuple(F.linear(summed, w, b) for w, b in zip(matrices, biases, strict=True))
            leaves = [x, *weights, *(b for b in biases if b is not None)]
            found.append([*(o.detach() for o in outputs), *gradients(outputs, leaves)])
        return found, axis

    for (fused, plain), axis in Ranks(2).run(run):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
        assert axis.counts == {("all_reduce", "backward"): 2}


def test_the_sum_over_ranks_starts_before_the_gradient_of_a_weight():
    axes, begun = [AxisHandle("tp", 2, rank) for rank in range(2)], []

    class Watch(TorchDispatchMode):
        """Whether the sum has started, at each product of rank 0."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.name():
                begun.append(axes[0].counts["all_reduce", "backward"])
            return func(*args, **(kwargs or {}))

    def run(rank: int) -> None:
        x, weights, biases = operands(True, False, rank)
        loss = torch.cat(column_linears(x, axes[rank], True, weights, biases), -1).sum()
        with nullcontext() if rank else Watch():
            loss.backward()

    Ranks(2).run(run)
    assert begun == [0, 0, 1, 1]  # two of the input's gradient, then those of the weights


def test_what_is_frozen_or_not_read_costs_nothing():
    axis = AxisHandle("tp", 1, 0)
    x, (first, second), _ = operands(False, False, 0)
    second.requires_grad_(False)
    column_linears(x.detach(), axis, False, [first, second], [None, None])[0].sum().backward()
    assert axis.counts == {}
    assert first.grad is not None
    assert second.grad is None


CUTS = {"behind each other": V(0, 6), "of each sequence": V(0, 4, 2), "of another dim": V(1, 6)}


def gathered(cut: Placement, again: bool | None, transposed: bool, rank: int) -> tuple[list[Tensor], AxisHandle, int]:
    """Outputs, gradients, what was exchanged and the bytes kept beside weights; ``again`` None: gather and products."""
    axis, kept = AxisHandle("tp", 2, rank), 0
    whole, weights, biases = operands(True, True, rank)
    own = part(whole.detach(), cut, 2, rank).clone().requires_grad_()
    matrices = weights if transposed else [w.detach().t().contiguous().requires_grad_() for w in weights]

    def keep(value: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if any(value is m for m in matrices) else value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        if again is None:
            x = gather(own, axis, cut)
            outputs = tuple(F.linear(x, m.t() if transposed else m, b) for m, b in zip(matrices, biases, strict=True))
        else:
            outputs = gathered_linears(own, axis, cut, again, transposed, matrices, list(biases))
    leaves = [own, *matrices, *(b for b in biases if b is not None)]
    return [*(o.detach() for o in outputs), *gradients(outputs, leaves)], axis, kept


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_is_gathered_again_gives_the_same_numbers_and_is_not_kept(cut, transposed):
    def run(rank: int) -> list[tuple[list[Tensor], AxisHandle, int]]:
        return [gathered(cut, again, transposed, rank) for again in (True, False, None)]

    for (again, axis, part_kept), (kept, once, whole_kept), (plain, _, _) in Ranks(2).run(run):
        assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))
        torch.testing.assert_close(again, plain, rtol=1e-12, atol=1e-12)
        assert (part_kept, whole_kept) == (18, 36)
        exchanged = {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}
        assert once.counts == exchanged
        assert axis.counts == {**exchanged, ("all_gather", "backward"): 1}
