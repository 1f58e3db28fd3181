"""How often a call adds to a value's gradient, held against what autograd does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.program.ops.aten import SEVERAL, num_addends

aten = torch.ops.aten
WEIGHT = torch.ones(4)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product with itself": lambda x: aten.mul.Tensor(x, x),
    "linear": lambda x: aten.linear.default(x, torch.ones(3, 4)),
    "layer norm": lambda x: aten.layer_norm.default(x, [4], WEIGHT, WEIGHT),
    "rms norm": lambda x: aten.rms_norm.default(x, [4], WEIGHT),
    "softmax": lambda x: aten.softmax.int(x, -1),
    "differences": lambda x: aten.diff.default(x),
    "joined to itself": lambda x: aten.cat.default([x, x]),
    "attention to itself": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: aten.dropout.default(x, 0.5, True),
    "gelu": lambda x: aten.gelu.default(x),
}


def counted_by_autograd(call: Callable[[Tensor], Tensor]) -> int:
    """Edges of the backward graph that lead to the value."""
    value = torch.randn(1, 2, 4, requires_grad=True).view(2, 4)
    seen, stack, found = set(), [call(value).grad_fn], 0
    while stack:
        node = stack.pop()
        for follower, _ in node.next_functions if node is not None else ():
            found += follower is value.grad_fn
            if follower is not value.grad_fn and follower not in seen:
                seen.add(follower)
                stack.append(follower)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_several_are_seen_where_autograd_makes_several_and_one_where_it_makes_one(name):
    traced = fx.symbolic_trace(lambda x: CALLS[name](x))
    (reader,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    value = next(iter(traced.graph.nodes))
    found = num_addends(reader, value)
    assert (found >= SEVERAL) == (counted_by_autograd(CALLS[name]) >= SEVERAL)
