"""One index of a dim is seen in every op of the canonical form that takes one, and in no call that takes several."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from passes.moe.ties import picks
from passes.program.ops.aten import aten

SHAPE = (3, 4, 5)


def calls(*made: tuple[Any, ...]) -> fx.Node:
    """A value of SHAPE with these readers, of lists all items too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(SHAPE, device="meta")
    for op, *args in made:
        node = graph.call_function(op, (x, *args))
        node.meta["val"] = op(x.meta["val"], *args)
        for i, value in enumerate(node.meta["val"] if isinstance(node.meta["val"], list | tuple) else ()):
            graph.call_function(getitem, (node, i)).meta["val"] = value
    return x


@pytest.mark.parametrize(
    ("op", "args", "found"),
    [
        (aten.slice.Tensor, (1, 3, 4), [3]),
        (aten.slice.Tensor, (1, None, 1), [0]),
        (aten.slice.Tensor, (-2, 2, 3), [2]),
        (aten.split_with_sizes.default, ([1, 1, 1, 1], -2), [*range(4)]),
        (aten.slice.Tensor, (1, 0, 2), []),
        (aten.split_with_sizes.default, ([2, 2], 1), []),
        (aten.split_with_sizes.default, ([1, 3], 1), []),
        (aten.slice.Tensor, (0, 2, 3), []),
        (aten.sum.dim_IntList, ([1],), []),
    ],
    ids=str,
)
def test_parts_along_a_dim(op, args, found):
    assert [pick.number for pick in picks(calls((op, *args)), 1)] == found
