"""Fresh values depend on seed, name, shape and place alone: any rows of them are those of the whole tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.weights.sources import BLOCK, blocks_of, normal
from tests.tools.examples import examples


def drawn(shape=(700, 300), rows=None, num_threads=1, name="w", seed=1, dtype=torch.float32) -> torch.Tensor:
    return normal(name, shape, dtype, seed=seed, std=0.5, rows=rows, num_threads=num_threads)


WHOLE = {shape: drawn(shape) for shape in ((700, 300), (65_537,), (3, BLOCK), (5, 2, 3), (1,))}


@examples(60)
@given(st.sampled_from(sorted(WHOLE)), st.data(), st.sampled_from([1, 2, 5]))
def test_rows_are_those_of_the_whole_whatever_the_number_of_threads(shape, data, num_threads):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0]))))
    rows = drawn(shape, (start, stop), num_threads)
    assert torch.equal(rows, WHOLE[shape][start:stop])


def test_any_number_of_threads_draws_the_same():
    assert torch.equal(drawn(num_threads=4), WHOLE[700, 300])


def test_a_global_generator_and_the_number_of_torchs_threads_change_nothing():
    threads = torch.get_num_threads()
    try:
        torch.manual_seed(99)
        torch.set_num_threads(2)
        assert torch.equal(drawn(), WHOLE[700, 300])
    finally:
        torch.set_num_threads(threads)


def test_names_seeds_and_blocks_differ():
    values = WHOLE[700, 300]
    assert not torch.equal(drawn(name="v"), values)
    assert not torch.equal(drawn(seed=2), values)
    flat = values.view(-1)
    assert len({flat[start : start + 16].sum().item() for start in range(0, flat.numel(), BLOCK)}) == 4


def test_the_values_are_normal():
    flat = WHOLE[3, BLOCK].view(-1) / 0.5
    assert flat.mean().item() == pytest.approx(0, abs=0.01)
    assert flat.std().item() == pytest.approx(1, rel=0.01)
    assert (flat.abs() < 1.96).double().mean().item() == pytest.approx(0.95, abs=0.002)


def test_every_dtype_holds_the_same_values_rounded():
    assert torch.equal(drawn(dtype=torch.bfloat16), WHOLE[700, 300].bfloat16())
    assert torch.equal(drawn(dtype=torch.float64), WHOLE[700, 300].double())


def test_a_shard_needs_the_blocks_that_it_is_in_and_no_others():
    row = 4096
    assert len(blocks_of(0, 32_000 * row)) == 2000
    assert blocks_of(4000 * row, 8000 * row) == range(250, 500)
    assert blocks_of(BLOCK - 1, BLOCK + 1) == range(2)
    assert len(blocks_of(7, 7)) == 0
