"""Writes in place become new values: the graph computes what the forward does, and its gradients, without any write."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.capture.functional import drop_needless_writes, is_write, make_functional
from planner.capture.gradients.python_side import PythonGradients
from planner.capture.gradients.regions import stop_gradients


def column(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] += w[:4]
    return y.sum(1)


def several_views(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    z, flat = y.t(), y.view(-1)
    z.mul_(2)
    flat[3:5] = w[:2]
    return y + z.t()


def rows_of_nothing(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(4, 6)
    for i in range(4):
        out[i] = x[i] * w
    return out


def pieces(x: Tensor, w: Tensor) -> Tensor:
    a, b = x.detach().clone().chunk(2, 1)
    a.add_(b)
    return a.relu_() + b * w[:3]


def view_made_before(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    before = y.unsqueeze(0)
    y.add_(1)
    return before * w


def filled_and_copied(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_empty(4, 6)
    y.copy_(w)
    y.fill_(2.0).mul_(x)
    return y * w


def selected(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach() * 1
    y.unbind(0)[1].zero_()
    return y * w


def indexed(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y[torch.tensor([0, 2])] = w
    return y


def masked(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.masked_fill_(y > 0, -1.0)
    y[x > 0.5] = 0
    return y.clamp_(min=0.1).sqrt_() * w


def halves(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty(4, 6)
    y[..., :3] = x[:, :3].sin()
    y[..., 3:] = x[:, 3:].cos()
    return y * w


def expanded_before(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    wide = y.expand(2, 4, 6)
    y.add_(w)
    return wide * 2


def box(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y[1:3, 2:4] += 1
    y[:, -1] = w[:4]
    return y.transpose(0, 1).contiguous().view(-1)


def detached_before(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    seen = y.detach()
    y.add_(w)
    return y * seen


def without_gradients(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(6)
    with torch.no_grad():
        y.add_(w).mul_(2)
    return x * y


def diagonal(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.diagonal().mul_(w[:4])
    return y


def of_a_diagonal(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    seen = y.diagonal()
    y.add_(w)
    return seen * 2


FORWARDS = [column, several_views, rows_of_nothing, pieces, view_made_before, filled_and_copied, selected, indexed,
            diagonal, of_a_diagonal, masked, halves, expanded_before, box, detached_before,
            without_gradients]  # fmt: skip


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.function(x, w)


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True))


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_writes_become_values_with_the_same_gradients(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    with PythonGradients().watched(model := Of(forward)):
        exported = torch.export.export(model, (x, w), strict=False)
    module = exported.graph_module
    drop_needless_writes(module.graph)
    stop_gradients(module.graph)
    assert any(map(is_write, module.graph.nodes))
    make_functional(module)
    assert not any(map(is_write, module.graph.nodes))
    given = {"x": x, "w": w} | {s.arg.name: exported.constants[s.target] for s in exported.graph_signature.input_specs
                                if s.target in exported.constants}  # fmt: skip
    out, truth = module(*(given[n.name] for n in module.graph.find_nodes(op="placeholder")))[0], forward(x, w)
    torch.testing.assert_close(out, truth, rtol=0, atol=0)
    torch.testing.assert_close(gradients(out, x, w), gradients(truth, x, w))
