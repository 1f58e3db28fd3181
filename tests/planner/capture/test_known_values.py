"""A branch may ask of values that a forward makes of constants, with what was written into them before it asks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError
from tests.models.one_body import Body, OneBody, assert_capture_equals, batch
from tests.tools.captured import capture


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
