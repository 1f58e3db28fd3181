"""Which parameters share a buffer, in which order and precision; moves of weights in shards, boundaries of stages."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.parameters import LocalParameter
from passes.partition.type_changes import sent_type
from passes.program.program import BoundaryPlan
from passes.types.types import I, P, R, V
from planner import Plan
from planner.sharding.buffers import Buffer, BufferOptions, buffers_of_rank
from planner.sharding.residency import Moves, Residency
from planner.sharding.shards import boundary
from planner.spec.optimizer import OptimizerSpec
from tests.models.plannable import build, spec_of
from tests.models.tiny import BATCH, LENGTH, WIDTH, planned
from tests.tools.captures import plan_again
from tests.tools.examples import examples

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
    buffers = buffers_of_rank(0, given_parameters, BufferOptions(OptimizerSpec(), {"dp": 2}))
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
    buffers = buffers_of_rank(
        0, [held(str(i), d) for i, d in enumerate(dtypes)], BufferOptions(OptimizerSpec(), {"dp": 1}, asked)
    )
    assert [b.gradient_dtype for b in buffers] == expected
    assert [b.main_dtype for b in buffers] == [DOUBLE if d == DOUBLE else SINGLE for d in dtypes]


def test_a_frozen_parameter_of_half_precision_changes_no_gradient():
    (buffer,) = buffers_of_rank(
        0, [held("a", DOUBLE), held("b", HALF, requires_grad=False)], BufferOptions(OptimizerSpec(), {"dp": 1})
    )
    assert buffer.gradient_dtype == DOUBLE


@given(st.permutations("abcde"), st.permutations("abcde"))
def test_stages_that_list_tied_weights_in_another_order_lay_them_out_alike(first, second):
    layouts = [
        buffers_of_rank(rank, [held(n, tied_stages=(0, 1)) for n in order], BufferOptions(OptimizerSpec(), {"dp": 2}))[
            0
        ].layout
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
    (buffer,) = buffers_of_rank(0, [held("a"), held("b")], BufferOptions(OptimizerSpec(zero=zero), {"dp": 4}))
    assert buffer.layout.num_ranks == (4 if zero else 1)
    assert buffer.layout.num_elements == (128 if zero else 16)


@pytest.mark.parametrize(
    ("dtype", "gradients", "bytes_an_element"),
    [(SINGLE, None, 8), (DOUBLE, None, 16), (HALF, None, 12), (HALF, "bfloat16", 16)],
)
def test_the_optimizer_keeps_two_moments_and_copies_of_what_is_less_precise(dtype, gradients, bytes_an_element):
    (buffer,) = buffers_of_rank(0, [held("a", dtype)], BufferOptions(OptimizerSpec(zero=0), {"dp": 1}, gradients))
    assert buffer.optimizer_bytes == bytes_an_element * 8
    averaged = OptimizerSpec(zero=0, ema=0.9)
    (buffer,) = buffers_of_rank(0, [held("a", dtype)], BufferOptions(averaged, {"dp": 1}, gradients))
    assert buffer.optimizer_bytes == (bytes_an_element + buffer.main_dtype.itemsize) * 8


# ---- the moves of weights in shards: nothing that is needed is missing, and no more is whole than is asked for


UNITS = st.tuples(st.integers(0, 1), st.integers(0, 3))
NEEDS = st.lists(st.tuples(st.lists(UNITS, min_size=1, max_size=3), st.lists(UNITS, max_size=2)), max_size=20)


@examples(200)
@given(needs=NEEDS, reshards=st.booleans())
def test_each_need_leaves_its_units_whole_and_frees_all_others(needs, reshards: bool):
    residency, whole = Residency(reshards=reshards), set()
    for units, ahead in needs:
        moves = residency.need(units, ahead)
        assert whole.issuperset(moves.freed)
        assert whole.isdisjoint(moves.gathered)
        whole = whole - set(moves.freed) | set(moves.gathered)
        assert whole == set(residency.whole)
        wanted = {*units, *ahead}
        assert whole == wanted if reshards else whole >= wanted
        assert not moves.freed or reshards
    assert set(residency.end().freed) == whole
    assert residency.end() == Moves()


def test_a_forward_and_its_backward_gather_the_last_block_once():
    residency, gathered = Residency(reshards=True), []
    for units, ahead in (((1,), (2,)), ((2,), (3,)), ((3,), ()), ((3,), (2,)), ((2,), (1,)), ((1,), ())):
        of = ([(0, n) for n in units], [(0, n) for n in ahead])
        gathered += [bucket for _, bucket in residency.need(*of).gathered]
    assert gathered == [1, 2, 3, 2, 1]


# ---- what one stage sends to the next: the live values in the shapes of one rank, never partial sums


def sent_at(made: Plan, cut: int) -> tuple[BoundaryPlan, ...]:
    assert made.decisions is not None
    return boundary(made.decisions, cut)


def test_partial_sums_are_added_before_they_are_sent_and_all_else_goes_as_it_is():
    assert [sent_type(p) for p in (P, I, R, V(1, 8))] == [I, I, R, V(1, 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_residual_is_whole_on_each_rank(tp):
    ((sent,), nothing) = (sent_at(planned(pp=2, tp=tp), cut) for cut in (0, 1))
    assert nothing == ()
    assert (sent.shape, sent.dtype) == ((BATCH, LENGTH, WIDTH), "float32")
    assert sent.placement in ("I", "R"), "the same on every rank, whatever its gradient is"
    assert (sent.bytes, sent.requires_grad) == (4 * BATCH * LENGTH * WIDTH, True)


def test_under_sequence_parallelism_a_rank_sends_its_part():
    (sent,) = sent_at(planned(pp=2, tp=2, sequence_parallel=True), 0)
    assert sent.shape == (BATCH, LENGTH // 2, WIDTH)
    assert sent.placement == "V(1:4)"
    assert sent.bytes == 4 * prod(sent.shape)


def test_nothing_is_sent_before_the_first_stage_and_after_the_last():
    made = planned("mlp mlp mlp", pp=3)
    assert [len(sent_at(made, cut)) for cut in (-1, 0, 1, 2, 3)] == [0, 1, 1, 0, 0]


def test_every_stage_receives_what_the_one_before_sends():
    stages = planned("mlp mlp mlp", pp=3).stages
    assert [stage.sends for stage in stages[:-1]] == [stage.receives for stage in stages[1:]]
    assert (stages[0].receives, stages[-1].sends) == ((), ())
