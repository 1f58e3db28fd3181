"""Whatever reads a sequence: over cp it gives one process's loss and gradients."""

from typing import Any

import pytest
import torch

from planner import PlanError, plan
from tests.models.sequence_readers import (
    FUSED,
    LENGTH,
    LOSSES,
    MIXING,
    POSITIONS,
    SCORES,
    VOCABULARY,
    Spelling,
    batch,
    build,
)
from tests.numeric.test_half_precision import check as close_in_half
from tests.tools.simulated_mesh import equals_one_process, spec_of

VIRTUAL = Spelling(positions="prompt")  # 4 trained tokens before 16
# what reads the whole sequence and makes as much of it: the op that every rank computes for all tokens
WHOLE = {
    Spelling("linear"): "aten.cumsum",
    Spelling(mixing="shift by pad"): "aten.pad",
    Spelling(mixing="shift by cat"): "aten.cat",
    Spelling(mixing="convolution"): "aten.conv1d",
    Spelling(mixing="roll"): "aten.roll",
    Spelling(mixing="flip"): "aten.flip",
    Spelling(mixing="cumsum"): "aten.cumsum",
    Spelling(mixing="softmax over tokens"): "aten.softmax.int",
    Spelling(mixing="fft"): "aten.fft_fft",
    Spelling(mixing="scan of 4 chunks"): "aten.slice.Tensor",
    VIRTUAL: "aten.cat",
}
ALL = [
    *(Spelling(attention) for attention in (*FUSED, *SCORES)),
    *(Spelling(mixing=mixing) for mixing in MIXING),
    *(Spelling(positions=positions) for positions in POSITIONS),
    *(Spelling(loss=loss) for loss in LOSSES),
]
SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}


def name_of(spelling: Spelling) -> str:
    return ", ".join([spelling.attention, spelling.mixing, spelling.positions, spelling.loss])


def check(spelling: Spelling, mesh: dict[str, int], **more: Any) -> None:
    equals_one_process(lambda: build(spelling), batch(), mesh, each=(1e-8, 1e-11), **more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spelling", dict.fromkeys(ALL), ids=name_of)
def test_over_two_ranks_it_equals_one_process(spelling):
    check(spelling, {"cp": 2})


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "more"), [({"cp": 4}, {}), ({"cp": 2, "tp": 2}, SEQUENCE_PARALLEL)], ids=["4", "tp"])
@pytest.mark.parametrize("attention", [*FUSED, *SCORES])
def test_over_more_ranks_and_beside_tp_too(attention, mesh, more):
    check(Spelling(attention), mesh, **more)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in ("differences", "deviation")])
def test_losses_are_those_of_the_whole_batch_beside_dp(loss):
    check(Spelling(loss=loss), {"cp": 2, "dp": 2})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "more"), [({"cp": 4}, {}), ({"cp": 2, "tp": 2}, SEQUENCE_PARALLEL)], ids=["4", "tp"])
@pytest.mark.parametrize("spelling", [s for s in WHOLE if s != VIRTUAL], ids=name_of)
def test_what_reads_whole_sequences_is_equal_over_more_ranks_and_beside_tp(spelling, mesh, more):
    check(spelling, mesh, **more)


def test_the_recurrence_between_chunks_is_computed_in_full_as_the_plan_says_with_its_bytes():
    made = plan(build(Spelling(mixing="scan of 4 chunks")), spec_of(batch(), {"cp": 2}))
    (row, _) = [row for row in made.diagnostics if "in full" in row.what]  # one for each block
    full = f"every rank of cp computes aten.einsum in full, {4 * 5 * 4 * 16 * 8:,} bytes"
    assert row.what == f"a sequence of 5 is not divisible by 2·cp = 4: {full}"
    assert "sequence_readers.py" in row.where
    assert not any("sequences of 4 tokens" in row.what for row in made.diagnostics)
    gathered = [
        row.bytes for row in made.collectives if (row.axis, row.kind, row.phase) == ("cp", "all_gather", "forward")
    ]
    assert 4 * 4 * 4 * 16 * 8 in gathered


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunks", [4, 3])
def test_in_bfloat16_a_scan_rounds_no_more_than_one_process(chunks):
    spelling = Spelling(mixing=f"scan of {chunks} chunks")
    close_in_half(lambda: build(spelling), [batch()], {"cp": 2}, torch.bfloat16, torch.float64)


def test_products_of_a_sequence_that_became_too_long_to_divide_are_refused_with_their_line():
    with pytest.raises(PlanError, match="a sequence of 20 tokens is not divisible by 2·cp = 8") as caught:
        check(VIRTUAL, {"cp": 4})
    assert "sequence_readers.py" in str(caught.value.where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spelling", WHOLE, ids=name_of)
def test_the_plan_says_which_ops_every_rank_computes_for_all_tokens_and_where(spelling):
    inputs = {"ids": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}, "labels": {"like": "ids"}}
    made = plan(build(spelling), {"mesh": {"cp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": inputs})
    found = [row for row in made.diagnostics if "for all tokens" in row.what]
    assert {row.what for row in found} == {f"every rank of cp computes {WHOLE[spelling]} for all tokens"}
    assert all("sequence_readers.py" in row.where for row in found)
