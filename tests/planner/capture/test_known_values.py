"""A branch may ask of values that a forward makes of constants, with what was written into them before it asks."""

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import Body, OneBody, assert_capture_equals, batch


def row_of_a_view(model: OneBody, x: Tensor) -> Tensor:
    mask = torch.ones(4, 4)
    mask[0] = 0.0
    return model.up(x) if mask.all() else model.up(x) * 2


def where_it_is_one(model: OneBody, x: Tensor) -> Tensor:
    mask = torch.ones(2, 4, dtype=torch.float64)
    mask[mask == 1] = -1.0
    return model.up(x) if (mask > 0).flatten().any().item() else model.up(x) * 2


def through_an_older_view(model: OneBody, x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    first = mask.view(2, 2)[0]
    mask.add_(1.0)
    return model.up(x) * int(first.sum())


@pytest.mark.parametrize("body", [row_of_a_view, where_it_is_one, through_an_older_view], ids=lambda f: f.__name__)
def test_a_branch_on_constants_sees_what_was_written_into_them(body: Body) -> None:
    assert_capture_equals(OneBody(body))


def written_from_the_batch(model: OneBody, x: Tensor) -> Tensor:
    mask = torch.zeros(4, dtype=x.dtype)
    mask[:2] = x.flatten()[:2]
    return model.up(x) * int(mask.sum())


def test_a_constant_that_the_batch_was_written_into_is_none() -> None:
    with pytest.raises(PlanError, match="depends on the values of tensors") as caught:
        capture(OneBody(written_from_the_batch), batch())
    assert "int(mask.sum())" in caught.value.where.code  # pyright: ignore


# ---- numbers, loops and shapes of values that depend on no input


def pieces_of_lengths(model: OneBody, x: Tensor) -> Tensor:
    lengths = torch.tensor([1, 2, 3])
    parts = [model.up(part) * n for part, n in zip(x.split(lengths.tolist(), 1), lengths, strict=True)]
    return torch.cat(parts, 1) + torch.cat(torch.tensor_split(x, lengths.cumsum(0)[:2], 1)[::-1], 1)


def a_grid_of_patches(model: OneBody, x: Tensor) -> Tensor:
    ids, grid = list[Tensor](), torch.tensor([[1, 2, 3]])
    for frames, height, width in grid:
        rows = torch.arange(height).unsqueeze(1).expand(-1, width)
        columns = torch.arange(width).unsqueeze(0).expand(height, -1)
        ids.append(torch.stack([rows.flatten(), columns.flatten()], -1).repeat(frames, 1))
    table = torch.outer(torch.arange(grid[:, 1:].max()), torch.ones(4, dtype=x.dtype))
    return model.up(x).view(-1, *grid[0].tolist(), x.shape[-1]).flatten(1, 3) + table[torch.cat(ids)].flatten(1)


def attention_within_images(model: OneBody, x: Tensor) -> Tensor:
    ends = torch.nn.functional.pad(torch.tensor([2, 4]).cumsum(0), (1, 0))
    mask = torch.zeros(6, 6, dtype=x.dtype)
    for i in range(1, len(ends)):
        mask[ends[i - 1] : ends[i], ends[i - 1] : ends[i]] = 1
    image, counts = torch.unique_consecutive(torch.tensor([0, 0, 1, 1, 1, 1]), return_counts=True)
    return model.up(mask @ x) * torch.repeat_interleave(image + 1, counts)[:, None]


def rows_by_masks(model: OneBody, x: Tensor) -> Tensor:
    keep = torch.arange(6) % 3 == 0
    here = x[:, keep] + x[:, keep.nonzero().squeeze(1)] + x.masked_select(keep[:, None]).view(-1, 2, 8)
    return model.up(torch.repeat_interleave(here, torch.tensor([2, 4]), 1)) * int(torch.where(keep)[0].numpy().sum())


def written_beside_the_batch(model: OneBody, x: Tensor) -> Tensor:
    base = torch.arange(6)
    y = torch.zeros_like(x).add_(base[:, None])  # reads the constant, and leaves it one
    return model.up(y + x[:, : int(base[3])].sum(1, keepdim=True)) if 3 in base else x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "body",
    [pieces_of_lengths, a_grid_of_patches, attention_within_images, rows_by_masks, written_beside_the_batch],
    ids=lambda f: f.__name__,
)
def test_numbers_and_shapes_of_constants_are_known(body: Body) -> None:
    assert_capture_equals(OneBody(body))


def nothing_asked(model: OneBody, x: Tensor) -> Tensor:
    positions = torch.arange(6)
    return model.up(x) + torch.nn.functional.one_hot(positions % 8, 8).to(x.dtype) * (positions > 2)[:, None]


def test_a_value_that_nothing_asks_for_stays_an_expression() -> None:
    assert not capture(OneBody(nothing_asked), batch()).constants


def by_a_random_number(model: OneBody, x: Tensor) -> Tensor:
    return model.up(x[:, torch.rand(6) > 0.5])


def by_the_batch(model: OneBody, x: Tensor) -> Tensor:
    return model.up(x[:, torch.zeros(6, dtype=x.dtype).copy_(x[0, :, 0]) > 0])


@pytest.mark.parametrize("body", [by_a_random_number, by_the_batch], ids=lambda f: f.__name__)
def test_a_shape_by_random_numbers_or_by_the_batch_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match="depends on data"):
        capture(OneBody(body), batch())
