"""Rules of ops that move elements: every admitted typing, on random shapes and cuts, against the whole op."""

import pytest
import torch
from hypothesis import strategies as st

from tests.tools.random_ops import check_options, op_of, real, rule_property, sizes

pytestmark = pytest.mark.check

aten = torch.ops.aten


@st.composite
def factorings(draw, count: int):
    """A number written as a product in one more way."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5))
    result = []
    for _ in range(2):
        groups = [1] * draw(st.integers(1, count))
        for p in draw(st.permutations(primes)):
            groups[draw(st.integers(0, len(groups) - 1))] *= p
        result.append(groups)
    return result


@rule_property
def test_reshape_carries_a_cut_with_its_elements(data):
    before, after = data.draw(factorings(4))
    check_options(data, op_of(aten.reshape.default, (real(*before), after)))


@rule_property
def test_reshape_to_heads_and_back(data):
    heads, width = data.draw(st.sampled_from([2, 3, 4, 6])), data.draw(st.sampled_from([2, 4]))
    flat, split = (
        [2, 3, heads * width * 3],
        data.draw(
            st.sampled_from(
                [[2, 3, 3, heads, width], [2, 3, heads, 3, width], [2, 3, heads * 3, width], [6, heads * 3 * width]]
            )
        ),
    )
    if data.draw(st.booleans()):
        flat, split = split, flat
    check_options(data, op_of(aten.reshape.default, (real(*flat), split)))


@rule_property
def test_permute_moves_the_cut_dim(data):
    shape = sizes(data.draw, data.draw(st.integers(1, 4)))
    dims = data.draw(st.permutations(range(len(shape))))
    check_options(data, op_of(aten.permute.default, (real(*shape), list(dims))))


@rule_property
def test_expand_repeats_on_each_rank(data):
    out = sizes(data.draw, data.draw(st.integers(1, 4)))
    shape = [n if data.draw(st.booleans()) else 1 for n in out][data.draw(st.integers(0, len(out))) :]
    check_options(data, op_of(aten.expand.default, (real(*shape), out)))


@rule_property
def test_split_gives_whole_segments(data):
    pieces = sizes(data.draw, data.draw(st.integers(1, 4)))
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(0, 2))
    shape[dim] = sum(pieces)
    index = data.draw(st.integers(0, len(pieces) - 1))
    check_options(data, op_of(aten.split_with_sizes.default, (real(*shape), pieces, dim), item=index))


@rule_property
def test_slice_keeps_whole_segments(data):
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, shape[dim] - 1))
    end = data.draw(st.integers(start + 1, shape[dim]))
    step = data.draw(st.sampled_from([(), (), (2,)]))
    check_options(data, op_of(aten.slice.Tensor, (real(*shape), dim, start, end, *step)))


@rule_property
def test_cat_joins_segments(data):
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(0, 2))
    operands = []
    for n in sizes(data.draw, data.draw(st.integers(1, 3))):
        operands.append(real(*(n if d == dim else size for d, size in enumerate(shape))))
    check_options(data, op_of(aten.cat.default, (operands, data.draw(st.sampled_from([dim, dim - 3])))))


@rule_property
def test_select_rows_by_a_whole_index(data):
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(0, 2))
    index = torch.randint(shape[dim], (data.draw(st.integers(1, 6)),))
    check_options(
        data, op_of(aten.index_select.default, (real(*shape), data.draw(st.sampled_from([dim, dim - 3])), index))
    )
