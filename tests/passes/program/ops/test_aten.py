"""Facts of one call, told by PyTorch's schemas and tags."""

from typing import Any

import pytest
import torch
from torch import fx

from passes.program.ops.aten import (
    arguments,
    aten,
    draws,
    is_mutable,
    is_pointwise,
    is_random,
    is_view,
    named,
    op_named,
    ops_named,
    position_of,
    reduced_dims,
    shape_of,
    value_bytes,
)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """One call, with a placeholder for each tensor."""
    graph = fx.Graph()

    def holder(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = tensor
        return node

    given = [holder(a) if isinstance(a, torch.Tensor) else a for a in args]
    node = graph.call_function(target, tuple(given), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


X = torch.ones(2, 3)


def test_arguments_are_those_given_and_named_has_the_defaults_too():
    node = call(aten.sum.dim_IntList, X, [1], dtype=torch.float64)
    x = node.args[0]
    assert arguments(node) == {"self": x, "dim": [1], "dtype": torch.float64}
    assert named(node) == {"self": x, "dim": [1], "keepdim": False, "dtype": torch.float64}


def test_other_arguments_are_bound_in_the_place_of_the_nodes_own():
    node = call(aten.sum.dim_IntList, X, [1])
    assert named(node, ["y", [0], True], {})["self"] == "y"
    assert named(node, ["y", [0], True], {})["keepdim"] is True


@pytest.mark.parametrize(
    ("node", "dims"),
    [
        (call(aten.sum.default, X), {0, 1}),
        (call(aten.sum.dim_IntList, X, []), {0, 1}),
        (call(aten.sum.dim_IntList, X, [-1]), {1}),
        (call(aten.softmax.int, X, -2), {0}),
        (call(aten.sum.dim_IntList, torch.tensor(1.0), [-1]), {0}),  # PyTorch takes dim -1 and 0 of a number
    ],
)
def test_reduced_dims(node: fx.Node, dims: set[int]):
    assert reduced_dims(node) == dims


def test_a_position_is_that_of_the_schema():
    assert [position_of(aten.group_norm.default, n) for n in ("input", "num_groups", "eps")] == [0, 1, 4]


def test_attention_is_random_only_where_it_drops():
    q = torch.ones(1, 1, 2, 2)
    op = aten.scaled_dot_product_attention.default
    assert draws(op)
    assert not is_random(call(op, q, q, q))
    assert not is_random(call(op, q, q, q, None, 0.0))
    assert is_random(call(op, q, q, q, None, 0.5))
    assert is_random(call(op, q, q, q, dropout_p=0.5))


def test_what_draws_what_writes_and_what_is_pointwise():
    ops = {"rand_like": "random", "add_.Tensor": "writes", "add.Tensor": "pointwise", "sum": "", "dropout": "pointwise"}

    def kind(op: Any) -> str:
        if is_pointwise(op):
            return "pointwise"
        return "random" if draws(op) else "writes" if is_mutable(op) else ""

    assert {name: kind(op_named(name)) for name in ops} == ops


def test_an_op_that_this_pytorch_lacks_is_left_out():
    assert op_named("no_such_op") is None
    assert op_named("add.NoSuchOverload") is None
    assert ops_named("relu no_such_op add.Tensor") == [aten.relu.default, aten.add.Tensor]


def test_a_view_that_converts_is_none():
    assert is_view(call(aten.reshape.default, X, [6])) or is_view(call(aten.view.default, X, [6]))
    assert not is_view(call(aten.to.dtype, X, torch.float64))
    assert not is_view(call(aten.add.Tensor, X, X))


def test_a_tuple_has_the_shape_of_its_first_and_the_bytes_of_all():
    node = call(aten.split_with_sizes.default, torch.ones(5, 2), [2, 3])
    assert shape_of(node) == (2, 2)
    assert value_bytes(node) == 5 * 2 * 4
