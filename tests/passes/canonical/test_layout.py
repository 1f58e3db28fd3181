"""What moves elements has few names: reshape, permute, slice, split, cat; each case computes what the model does."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.tools.canonical import canonical

RESHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(2, 6, 2, 4),
    lambda x: x.reshape(2, -1, 2, 4),
    lambda x: x.unflatten(-1, (2, 4)),
    lambda x: x.unsqueeze(2).view(2, 6, 2, 4),
    lambda x: x.unsqueeze(-1).squeeze().view(2, 6, -1, 4),
]
PERMUTES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(1, 2),
    lambda x: x.permute(0, 2, 1),
    lambda x: x.permute(0, -1, -2),
    lambda x: x.mT,
    lambda x: x.movedim(-1, 1),
    lambda x: x.swapaxes(2, 1),
    lambda x: torch.moveaxis(x, 1, 2),
    lambda x: x.adjoint(),
]
NOTHING: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(2, 6, 8),
    lambda x: x.permute(0, 1, 2),
    lambda x: x.expand(2, 6, 8),
    lambda x: x.to(torch.float64),
    lambda x: x.type_as(x),
    lambda x: x[:, :, :],
    lambda x: x.narrow(1, 0, 6),
    lambda x: x[:, :1000],
    lambda x: torch.cat([x]),
    lambda x: torch.cat([x.new_zeros(0), x]),
]


def features(way: Callable[[Tensor], Tensor]) -> str:
    """Of ``way`` and a sine (so that what follows is not merged with it), as features again."""
    return canonical(lambda _, x: way(x).sin().reshape(x.shape))


@pytest.mark.thorough
@pytest.mark.parametrize("way", RESHAPES)
def test_every_view_is_a_reshape_to_static_sizes(way):
    lines = features(way).splitlines()
    sine = next(i for i, line in enumerate(lines) if "aten.sin(" in line)
    assert lines[sine - 1].endswith("[2, 6, 2, 4])")
    assert {line.split(" = ")[1].split("(")[0] for line in lines} == {"aten.reshape", "aten.sin"}


@pytest.mark.thorough
@pytest.mark.parametrize("way", PERMUTES)
def test_every_exchange_of_dims_is_the_same_permute(way):
    assert features(way) == features(PERMUTES[0])
    assert "v0 = aten.permute(x, [0, 2, 1])\n" in features(way)


@pytest.mark.thorough
@pytest.mark.parametrize("way", NOTHING)
def test_what_changes_nothing_leaves_no_call(way):
    assert features(way).splitlines()[0] == "v0 = aten.sin(x)"


@pytest.mark.thorough
def test_every_split_in_equal_parts_is_the_same_split():
    by_size = canonical(lambda _, x: torch.cat(x.split(3, 1)[::-1], 1))
    assert_expected_inline(
        by_size,
        """\
v0 = aten.split_with_sizes(x, [3, 3], 1)
v1 = operator.getitem(v0, 0)
v2 = operator.getitem(v0, 1)
v3 = aten.cat([v2, v1], 1)
""",
    )
    chunked = canonical(lambda _, x: torch.cat(x.chunk(2, 1)[::-1], 1))
    assert chunked == canonical(lambda _, x: torch.cat(x.split([3, 3], 1)[::-1], 1))
    assert chunked == canonical(lambda _, x: torch.cat(torch.tensor_split(x, 2, 1)[::-1], 1))
    assert chunked == by_size


@pytest.mark.thorough
def test_a_split_in_unequal_parts_has_their_sizes():
    assert_expected_inline(
        canonical(lambda _, x: torch.cat(x.split(4, 1)[::-1], 1)),
        """\
v0 = aten.split_with_sizes(x, [4, 2], 1)
v1 = operator.getitem(v0, 0)
v2 = operator.getitem(v0, 1)
v3 = aten.cat([v2, v1], 1)
""",
    )


def test_pieces_of_an_unbind_lose_their_dim_and_a_stack_gives_it_back():
    assert_expected_inline(
        canonical(lambda _, x: torch.stack(x.unbind(0)[::-1], 0)),
        """\
v0 = aten.split_with_sizes(x, [1, 1], 0)
v1 = operator.getitem(v0, 0)
v2 = aten.reshape(v1, [6, 8])
v3 = operator.getitem(v0, 1)
v4 = aten.reshape(v3, [6, 8])
v5 = aten.reshape(v4, [1, 6, 8])
v6 = aten.reshape(v2, [1, 6, 8])
v7 = aten.cat([v5, v6], 0)
""",
    )


def test_a_select_is_a_slice_of_one_without_its_dim():
    assert_expected_inline(
        canonical(lambda _, x: x + x.select(1, -2).unsqueeze(1)),
        """\
v0 = aten.slice.Tensor(x, 1, 4, 5)
v1 = aten.reshape(v0, [2, 8])
v2 = aten.reshape(v1, [2, 1, 8])
v3 = aten.add.Tensor(x, v2)
""",
    )


def test_bounds_of_a_slice_are_plain():
    assert_expected_inline(
        canonical(lambda _, x: torch.cat([x[:, -2:], x[:, :-2]], 1)),
        """\
v0 = aten.slice.Tensor(x, 1, 4, 6)
v1 = aten.slice.Tensor(x, 1, 0, 4)
v2 = aten.cat([v0, v1], 1)
""",
    )


def test_a_step_stays_and_its_end_is_the_last_element_that_is_taken():
    assert_expected_inline(
        canonical(lambda _, x: torch.cat([x[..., ::2], x[..., 1::2]], -1)),
        """\
v0 = aten.slice.Tensor(x, 2, 0, 7, 2)
v1 = aten.slice.Tensor(x, 2, 1, 8, 2)
v2 = aten.cat([v0, v1], -1)
""",
    )


def test_repeat_interleave_is_a_new_dim_that_is_expanded():
    assert_expected_inline(
        canonical(lambda _, x: x[..., :4].repeat_interleave(2, -1)),
        """\
v0 = aten.slice.Tensor(x, 2, 0, 4)
v1 = aten.reshape(v0, [2, 6, 4, 1])
v2 = aten.expand(v1, [2, 6, 4, 2])
v3 = aten.reshape(v2, [2, 6, 8])
""",
    )


def test_tile_takes_fewer_numbers_than_there_are_dims():
    assert canonical(lambda _, x: x[..., :4].tile(2)) == canonical(lambda _, x: x[..., :4].repeat(1, 1, 2))
    assert canonical(lambda _, x: x.tile(1, 1) + 1) == canonical(lambda _, x: x + 1)


@pytest.mark.thorough
def test_a_change_of_dtype_has_one_name():
    there = canonical(lambda _, x: x.float().sin().double())
    assert there == canonical(lambda _, x: x.to(torch.float32).sin().to(x))
    assert there == canonical(lambda _, x: x.type(torch.float32).sin().type_as(x))
    assert_expected_inline(
        there,
        """\
v0 = aten.to.dtype(x, torch.float32)
v1 = aten.sin(v0)
v2 = aten.to.dtype(v1, torch.float64)
""",
    )
