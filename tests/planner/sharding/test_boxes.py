"""Runs of rank's parts as boxes of the whole tensor: whatever the cut, each element lies in exactly one."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.moe.layers import ExpertPart
from passes.types.types import I, Placement, Segment
from planner.sharding.boxes import Box, Part, Piece, num_corners, pieces_of_run, rectangles, tiles
from runtime.weights.shards import shard
from tests.tools.examples import examples

pytestmark = pytest.mark.check

SHAPES = st.lists(st.integers(1, 5), max_size=4)


def whole_of(shape: list[int]) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1).view(shape)


@given(SHAPES, st.data())
def test_rectangles_are_the_run_in_its_order(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    everything = Box(tuple(0 for _ in shape), tuple(shape))
    found = [x for box in rectangles(shape, start, stop) for x in whole_of(shape)[box.slices_in(everything)].flatten()]
    assert [int(x) for x in found] == list(range(start + 1, stop + 1))
    assert len(list(rectangles(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[Part]]:
    """A shape, and the parts of all ranks of its axis and of ep."""
    size, ep = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    segments = [Segment(size * draw(st.integers(1, 3)), draw(st.booleans())) for _ in range(draw(st.integers(1, 3)))]
    last = draw(st.integers(1, 2 * size))
    padding = -last % size
    segments.append(Segment(last, True))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(s.size for s in segments)
    placement = Placement("V", dim, tuple(segments), padding) if draw(st.booleans()) else I
    expert, other = None, next((d for d in range(len(shape)) if d != dim), None)
    if ep > 1 and other is not None:
        shape[other] = ep * draw(st.integers(1, 2))
        expert = ExpertPart(shape[other], other)
    ep = ep if expert is not None else 1
    return shape, [Part(placement, size, rank, expert, ep, r) for rank in range(size) for r in range(ep)]


@examples(200)
@given(cuts(), st.integers(1, 4))
def test_the_ranks_pieces_hold_each_element_once_and_say_where_it_is(
    drawn: tuple[list[int], list[Part]], num_shards: int
) -> None:
    shape, parts = drawn
    whole, boxes = whole_of(shape), []
    for part in parts:
        local = shard(whole, part).contiguous()
        size = local.numel()
        for index in range(num_shards):
            start, stop = size * index // num_shards, size * (index + 1) // num_shards
            run = local.view(-1)[start:stop]
            for piece in pieces_of_run(part, shape, local.shape, start, stop):
                values = view(run, piece)
                assert torch.equal(values, whole[tuple(map(slice, piece.box.start, piece.box.stop))])
                is_copy = part.rank and (piece.is_shared or not part.placement.is_sharded)
                boxes += [] if is_copy else [piece.box]
    assert tiles(shape, boxes)
    assert not tiles(shape, boxes[1:])
    assert not tiles(shape, [*boxes, boxes[0]])
    assert num_corners(shape, boxes) >= len(boxes)


def view(run: torch.Tensor, piece: Piece) -> torch.Tensor:
    of_outer = run[piece.first : piece.first + piece.outer.num_elements].view(piece.outer.shape)
    return of_outer[piece.inner.slices_in(piece.outer)]


def test_boxes_that_overlap_and_leave_as_much_out_do_not_tile() -> None:
    assert tiles((4,), [Box((0,), (2,)), Box((2,), (4,))])
    assert not tiles((4,), [Box((0,), (2,)), Box((1,), (3,))])
    assert not tiles((2, 2), [Box((0, 0), (1, 2)), Box((0, 0), (2, 1))])
    assert tiles((), [Box((), ())])
    assert not tiles((), [])
    assert tiles((0, 3), [])


def test_common_elements_and_where_they_lie() -> None:
    first, second = Box((1, 0), (4, 2)), Box((3, 1), (9, 9))
    common = first.intersection(second)
    assert common == Box((3, 1), (4, 2))
    assert common.slices_in(first) == (slice(2, 3), slice(1, 2))
    assert first.intersection(Box((4, 0), (5, 2))) is None
