"""The harness of the rules' property tests sees a typing that is wrong by one kind."""

import pytest
import torch

from passes.partition.typings.base import Form
from passes.partition.typings.table import Option
from passes.types.types import I, P, Placement, R, V
from tests.tools.random_ops import Weight, op_of, real
from tests.tools.simulated_ranks import check

aten = torch.ops.aten
COLUMN = (R, V(0, 4)), V(1, 4)
ROW = (V(1, 6), V(1, 6)), P


def linear_of(args: tuple[Placement, ...], out: Placement) -> None:
    torch.manual_seed(0)
    check(op_of(aten.linear.default, (real(3, 6), Weight(real(4, 6)))), Option(args, out, Form.PARTS), 2)


@pytest.mark.parametrize(("args", "out"), [COLUMN, ROW], ids=["column", "row"])
def test_column_and_row_parallel_linears_are_right(args, out):
    linear_of(args, out)


@pytest.mark.parametrize(
    ("args", "out"),
    [
        ((I, V(0, 4)), V(1, 4)),  # the reader of a sharded product has partial gradients
        ((R, V(0, 2, 2)), V(1, 4)),  # segments of the weight in another order than the result's
        ((R, V(0, 4)), P),
        ((V(1, 6), V(1, 6)), I),  # a sum that nobody adds up
        ((R, R), I),
        ((I, I), R),
    ],
    ids=["input I", "segments", "result P", "result I", "R to I", "I to R"],
)
def test_a_wrong_type_is_caught(args, out):
    with pytest.raises(AssertionError):
        linear_of(args, out)


def test_a_row_bias_added_on_every_rank_is_caught():
    op = op_of(aten.add.Tensor, (real(3, 4), Weight(real(4))))
    check(op, Option((P, P), P, Form.PARTIAL), 2)
    with pytest.raises(AssertionError):
        check(op, Option((P, R), P, Form.PARTIAL), 2)
