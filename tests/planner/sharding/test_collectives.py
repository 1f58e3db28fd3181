"""What a step exchanges over each buffer: zero 0 and 1, sums over tp and over the stages of a tied weight, the norm."""

from typing import Literal

import pytest
import torch

from passes.parameters import LocalParameter
from passes.types.conversions import CollectivePlan
from passes.types.types import I, Placement, R, Segment, V
from planner.mesh import Mesh
from planner.sharding.buffers import Buffer, BufferOptions, buffers_of_rank
from planner.sharding.shards import step_collectives, sums_of
from planner.spec.optimizer import OptimizerSpec

CUT = V(0, 16)
NORM = ("all_reduce", "world", 8 * (3 + 5 * 2))  # norm, loss, who is asked to stop, and five figures of each of 2 ranks
NORM_OF_4 = ("all_reduce", "world", 8 * (3 + 5 * 4))


def buffers(zero: Literal[0, 1], dp: int, *held: LocalParameter, gradients: str | None = None) -> tuple[Buffer, ...]:
    options = BufferOptions(OptimizerSpec(zero=zero, alignment="none"), {"dp": dp}, gradients)
    return buffers_of_rank(0, held, options)


def weight(name: str = "w", placement: Placement = CUT, dtype: torch.dtype = torch.float32, **rest):
    shape = placement.local_shape((16, 4), 2)
    return LocalParameter(name, shape, dtype, placement, (16, 4), **rest)


def rows(mesh: Mesh, made: tuple[Buffer, ...], zero: int) -> list[tuple[str, str, int]]:
    found = step_collectives(mesh, made, zero)
    assert {(c.phase, c.per, c.count) for c in found} <= {("step", "step", 1)}
    return [(c.kind, c.axis, c.bytes) for c in found]


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, [("all_reduce", "dp", 32 * 4), NORM]),
        (1, [("reduce_scatter", "dp", 32 * 4), ("all_gather", "dp", 32 * 4), NORM]),
    ],
)
def test_over_dp(zero, expected):
    assert rows(Mesh(dp=2), buffers(zero, 2, weight()), zero) == expected


def test_gradients_travel_in_their_dtype_and_parameters_in_theirs():
    made = buffers(1, 2, weight(dtype=torch.bfloat16))
    assert rows(Mesh(dp=2), made, 1) == [("reduce_scatter", "dp", 32 * 4), ("all_gather", "dp", 32 * 2), NORM]
    made = buffers(1, 2, weight(dtype=torch.bfloat16), gradients="bfloat16")
    assert rows(Mesh(dp=2), made, 1) == [("reduce_scatter", "dp", 32 * 2), ("all_gather", "dp", 32 * 2), NORM]


def test_partial_gradients_are_summed_over_tp_after_dp_a_shard_on_each_rank():
    made = buffers(1, 2, weight(placement=R, partial_over=("tp",)))
    assert rows(Mesh(tp=2, dp=2), made, 1) == [
        ("reduce_scatter", "dp", 64 * 4),
        ("all_reduce", "tp", 32 * 4),
        ("all_gather", "dp", 64 * 4),
        NORM_OF_4,
    ]


def test_of_a_fused_weight_only_the_whole_segments_are_summed_over_tp():
    fused = Placement("V", 0, (Segment(12), Segment(4, sharded=False)))
    made = buffers(0, 1, weight(placement=fused, partial_over=("tp",)))
    assert rows(Mesh(tp=2), made, 0) == [("all_reduce", "tp", 4 * 4 * 4), NORM]
    sharded = buffers(1, 2, weight(placement=fused, partial_over=("tp",)))
    assert ("all_reduce", "tp", 4 * 4 * 4) in rows(Mesh(tp=2, dp=2), sharded, 1), "the rank that owns the most of them"


def test_a_tied_weight_is_summed_over_its_stages_and_not_between_chunks_of_one_rank():
    tied = buffers(0, 1, weight(placement=I, partial_over=("embedding",), tied_stages=(0, 3)))
    assert rows(Mesh(pp=2, vpp=2), tied, 0) == [("all_reduce", "embedding", 64 * 4), NORM]
    (same_rank,) = buffers(0, 1, weight(placement=I, partial_over=("embedding",), tied_stages=(0, 2)))
    assert sums_of(same_rank, Mesh(pp=2, vpp=2)) == ()
    assert rows(Mesh(pp=2, vpp=2), (same_rank,), 0) == [NORM]


def test_tp_is_summed_before_the_stages():
    (both,) = buffers(0, 1, weight(placement=R, partial_over=("embedding", "tp"), tied_stages=(0, 1)))
    assert sums_of(both, Mesh(pp=2, vpp=2)) == ("tp", "embedding")


def test_sums_of_half_precision_are_of_main_gradients():
    made = buffers(0, 1, weight(placement=R, dtype=torch.bfloat16, partial_over=("tp",)), gradients="bfloat16")
    assert rows(Mesh(tp=2), made, 0) == [("all_reduce", "tp", 64 * 4), NORM]


def test_one_rank_alone_exchanges_nothing():
    assert step_collectives(Mesh(), buffers(1, 1, weight()), 1) == ()


@pytest.mark.parametrize("wrong", [{"phase": "after"}, {"per": "hour"}, {"bytes": -1}, {"count": -1}])
def test_a_row_that_cannot_be_is_refused(wrong):
    fields = {"kind": "all_reduce", "axis": "tp", "phase": "step", "where": "w", "bytes": 1, "count": 1, "per": "step"}
    CollectivePlan(**fields)
    with pytest.raises(Exception, match="all_reduce at w"):
        CollectivePlan(**fields | wrong)
