"""The batch's rows reach the right dp rank and microbatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from runtime.data.batches import BatchLayout, check_here, num_tokens

CPU = torch.device("cpu")


def layout(dp_rank: int = 1) -> BatchLayout:
    return BatchLayout({"x": ((2,), torch.int64)}, 8, 2, 2, dp_rank)


def rows(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(size).view(-1, 1).expand(size, 2).contiguous()}


def first_column(microbatches) -> list[list[int]]:
    return [m["x"][:, 0].tolist() for m in microbatches]


def test_dp_rank_1_takes_the_second_half_in_microbatches_2_and_3():
    assert first_column(layout().microbatches(rows(8), ["x"], CPU)) == [[4, 5], [6, 7]]
    assert layout().first_microbatch == 2


def test_a_local_batch_is_all_this_ranks():
    layout().check(rows(4), local=True)
    assert first_column(layout().microbatches(rows(4), ["x"], CPU, local=True)) == [[0, 1], [2, 3]]


def test_the_loss_counts_over_every_microbatch_of_the_global_batch():
    assert first_column(layout().all_microbatches(rows(8), ["x"], CPU)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_stage_that_reads_no_input_has_empty_microbatches():
    assert layout().microbatches(rows(8), [], CPU) == [{}, {}]


def test_a_global_batch_given_as_local_is_refused():
    with pytest.raises(PlanError, match=r"has shape \[8, 2\], the plan expects \[4, 2\]") as caught:
        layout().check(rows(8), local=True)
    assert "the 4 sequences of this dp rank" in caught.value.fix


def test_a_value_that_is_no_tensor_is_refused():
    with pytest.raises(PlanError, match=r"batch\['x'\] is a list"):
        layout().check({"x": [1, 2]})  # pyright: ignore[reportArgumentType]


def test_tokens_are_the_elements_of_the_first_integer_input():
    assert num_tokens({"image": torch.zeros(4, 9), "ids": torch.zeros(4, 3, dtype=torch.int64)}) == 12
    assert num_tokens({"image": torch.zeros(4, 9)}) == 4


@pytest.mark.gpu
def test_microbatches_come_to_a_gpu_from_pinned_memory_with_their_values():
    batch = rows(8)
    placed = layout().microbatches(batch, ["x"], torch.device("cuda", 0))
    assert all(m["x"].is_cuda for m in placed)
    assert first_column(placed) == first_column(layout().microbatches(batch, ["x"], CPU))
    assert not batch["x"].is_pinned()


def test_of_several_ranks_the_one_with_a_bad_id_is_named():
    rows_of_table = IdRange(0, 3, None, ((0, 2),), "the embedding wte", "rows")
    strict = replace(layout(), ids={"x": (rows_of_table,)})
    with pytest.raises(
        PlanError, match=r"^rank 5: batch\['x'\] holds 3 at \[3, 0\]; the embedding wte has rows 0 to 2"
    ):
        check_here(strict, rows(4), 5, 8, local=True)
    with pytest.raises(PlanError, match=r"^batch\['x'\] holds 3"):
        check_here(strict, rows(4), 0, 1, local=True)
