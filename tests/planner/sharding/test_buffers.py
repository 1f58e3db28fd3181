"""Which parameters share a buffer, in which order and precision; stages agree about the buffers of a tied weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.parameters import LocalParameter
from passes.types.types import V
from planner.sharding.buffers import Buffer, buffers_of_rank
from planner.spec.optimizer import OptimizerSpec
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def held(name: str, dtype: torch.dtype = SINGLE, **rest) -> LocalParameter:
    return LocalParameter(name, (4, 2), dtype, V(0, 8), (8, 2), **rest)


def names(buffers: tuple[Buffer, ...]) -> list[list[str]]:
    return [[p.fqn for p in buffer.parameters] for buffer in buffers]


def test_one_buffer_for_each_dtype_and_each_set_of_sums():
    given_parameters = [
        held("a"),
        held("b", HALF),
        held("c", partial_over=("tp",)),
        held("d"),
        held("e", partial_over=("embedding",), tied_stages=(0, 1)),
        held("f", requires_grad=False),
        held("a"),
    ]
    buffers = buffers_of_rank(0, given_parameters, OptimizerSpec(), {"dp": 2})
    assert names(buffers) == [["a", "d"], ["b"], ["c"], ["e"]]
    assert [b.partial_over for b in buffers] == [(), (), ("tp",), ("embedding",)]
    assert buffers[3].tied_stages == (0, 1)


@pytest.mark.parametrize(
    ("dtypes", "asked", "expected"),
    [
        ([SINGLE], None, [SINGLE]),
        ([DOUBLE], None, [DOUBLE]),
        ([HALF], None, [SINGLE]),
        ([torch.float16], None, [SINGLE]),
        ([HALF, SINGLE], None, [SINGLE, SINGLE]),
        ([SINGLE, DOUBLE], None, [SINGLE, DOUBLE]),
        ([DOUBLE, HALF], None, [DOUBLE, SINGLE]),
        ([HALF], "bfloat16", [HALF]),
        ([SINGLE, HALF], "bfloat16", [HALF, HALF]),
    ],
)
def test_gradients_are_as_asked_else_of_their_parameters_but_float32_at_least(dtypes, asked, expected):
    buffers = buffers_of_rank(0, [held(str(i), d) for i, d in enumerate(dtypes)], OptimizerSpec(), {"dp": 1}, asked)
    assert [b.gradient_dtype for b in buffers] == expected
    assert [b.main_dtype for b in buffers] == [DOUBLE if d == DOUBLE else SINGLE for d in dtypes]


def test_a_frozen_parameter_of_half_precision_changes_no_gradient():
    (buffer,) = buffers_of_rank(
        0, [held("a", DOUBLE), held("b", HALF, requires_grad=False)], OptimizerSpec(), {"dp": 1}
    )
    assert buffer.gradient_dtype == DOUBLE


@given(st.permutations("abcde"), st.permutations("abcde"))
def test_stages_that_list_tied_weights_in_another_order_lay_them_out_alike(first, second):
    layouts = [
        buffers_of_rank(rank, [held(n, tied_stages=(0, 1)) for n in order], OptimizerSpec(), {"dp": 2})[0].layout
        for rank, order in enumerate((first, second))
    ]
    assert layouts[0] == layouts[1]


def test_a_tied_weight_has_equal_buffers_on_both_of_its_stages():
    made = plan_again(build("gpt"), spec_of("gpt", mesh={"tp": 2, "pp": 2, "dp": 2}))
    tied = [b for b in made.optimizer.buffers if any("tokens.weight" in bucket.parameters for bucket in b.buckets)]
    assert [b.pp_rank for b in tied] == [0, 1]
    assert tied[0].buckets == tied[1].buckets
    assert tied[0].num_elements == tied[1].num_elements


@pytest.mark.parametrize("zero", [0, 1])
def test_only_zero_1_cuts_and_aligns(zero):
    (buffer,) = buffers_of_rank(0, [held("a"), held("b")], OptimizerSpec(zero=zero), {"dp": 4})
    assert buffer.layout.num_ranks == (4 if zero else 1)
    assert buffer.layout.num_elements == (128 if zero else 16)


@pytest.mark.parametrize(
    ("dtype", "gradients", "bytes_an_element"),
    [(SINGLE, None, 8), (DOUBLE, None, 16), (HALF, None, 12), (HALF, "bfloat16", 16)],
)
def test_the_optimizer_keeps_two_moments_and_copies_of_what_is_less_precise(dtype, gradients, bytes_an_element):
    (buffer,) = buffers_of_rank(0, [held("a", dtype)], OptimizerSpec(zero=0), {"dp": 1}, gradients)
    assert buffer.optimizer_bytes == bytes_an_element * 8
    averaged = OptimizerSpec(zero=0, ema=0.9)
    (buffer,) = buffers_of_rank(0, [held("a", dtype)], averaged, {"dp": 1}, gradients)
    assert buffer.optimizer_bytes == (bytes_an_element + buffer.main_dtype.itemsize) * 8
