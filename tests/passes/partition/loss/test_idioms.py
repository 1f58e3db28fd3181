"""However a divisor is written, the shares of microbatches add up to the model's own loss on the global batch."""

from __future__ import annotations

import pytest

from planner import PlanError
from tests.models.loss_idioms import LOOPS, SHAPES
from tests.models.no_sums import NO_SUMS, OF_ANOTHER_SIZE
from tests.tools.loss_shares import Loss, Shared, Small, shared

EXACT = 1e-9


def of(loss: Loss, micro: int, num_microbatches: int) -> Shared:
    return shared(lambda: Small(loss), micro, num_microbatches)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_a_divisor_made_of_shapes_counts_the_global_batch(name: str) -> None:
    found = of(SHAPES[name], 2, 3)
    assert found.difference < EXACT
    assert not found.is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "chunk_means"])
def test_loops_chunks_and_stacks_over_the_batch_add_up_and_raise_no_false_warning(name: str, micro: int) -> None:
    found = of(LOOPS[name], micro, 3)
    assert found.difference < EXACT
    assert not found.is_told


def test_the_mean_of_chunks_means_is_exact_where_the_chunks_are_equal_and_told_where_not() -> None:
    equal, uneven = of(LOOPS["chunk_means"], 2, 3), of(LOOPS["chunk_means"], 1, 3)
    assert equal.difference < EXACT
    assert not equal.is_told
    assert uneven.is_told


REFUSED = [*((name, 1) for name in OF_ANOTHER_SIZE), ("neighbours", 2), ("columns", 1), ("columns", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "micro"), [(n, m) for n in NO_SUMS for m in (1, 2) if (n, m) not in REFUSED])
def test_a_loss_that_is_no_sum_over_sequences_is_never_silent(name: str, micro: int) -> None:
    assert of(NO_SUMS[name], micro, 3).is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "micro"), REFUSED)
def test_a_loss_whose_mean_over_microbatches_is_of_another_size_is_refused_at_its_line(name: str, micro: int) -> None:
    with pytest.raises(PlanError, match="would differ from the loss of the global batch") as error:
        of((NO_SUMS | OF_ANOTHER_SIZE)[name], micro, 3)
    assert "loss_shares.py" in str(error.value.where)
