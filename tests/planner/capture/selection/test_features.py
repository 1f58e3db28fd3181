"""Features put where the tokens of images stand: the captured program computes what the model does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.program.program import Program
from planner.capture.export import capture

IMAGE, ROWS, IMAGES, LENGTH, WIDTH, PIXELS = 19, 2, 3, 7, 8, 6


class Model(nn.Module):
    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tokens, self.encode, self.way = nn.Embedding(20, WIDTH), nn.Linear(PIXELS, WIDTH), way

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        return self.way(self, self.tokens(ids), ids == IMAGE, images).sin().sum()


def in_rows(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None], m.encode(images))


def in_rows_of_an_expanded_mask(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None].expand_as(x).to(x.device), m.encode(images).flatten(0, 1))


def counted_by_elements(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    features, spread = m.encode(images).flatten(0, 1), mask[..., None].expand_as(x)
    torch._check(x[spread].numel() == features.numel())
    return x.masked_scatter(spread, features)


def element_by_element(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None] & (torch.arange(WIDTH) % 2 == 0), m.encode(images)[..., ::2])


def added_to_rows(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x = x.clone()
    rows = x[mask, :] + m.encode(images).flatten(0, 1)
    x[mask, :] = rows
    return x


def multiplied(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = (x[mask] * m.encode(images).flatten(0, 1)).sin()
    return x


def added_to_features(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = (m.encode(images).flatten(0, 1) - x[mask]).sin()
    return x


def chosen(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x, features = x.clone(), m.encode(images).flatten(0, 1)
    x[mask] = torch.where(features > 0, features, x[mask])
    return x


def side_by_side(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = torch.cat([m.encode(images).flatten(0, 1), x[mask]], -1)[:, 4 : 4 + WIDTH]
    return x


def without_padding(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    flat = images.flatten(0, 1)
    real = (flat == 0).sum(-1) != PIXELS
    parts = m.encode(flat[real]).split(real.view(ROWS, IMAGES).sum(1).tolist())
    return x.masked_scatter(mask[..., None], torch.cat(parts))


def without_padding_but_one(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    flat = images.flatten(0, 1)
    real = (flat == 0).sum(-1) != PIXELS
    real[0] |= ~real.any()
    parts = m.encode(flat[real]).split(real.view(ROWS, IMAGES).sum(1).tolist())
    return x.masked_scatter(mask[..., None], torch.cat(parts))


def written_to_rows(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = m.encode(images).flatten(0, 1)
    return x


PLACED = [in_rows, written_to_rows, in_rows_of_an_expanded_mask, element_by_element, added_to_rows, multiplied]
PLACED += [counted_by_elements, added_to_features, chosen, side_by_side]
REAL = [without_padding, without_padding_but_one]


def given() -> dict[str, Tensor]:
    """Three image tokens in each row, at other places."""
    ids = torch.randint(IMAGE, (ROWS, LENGTH))
    ids[0, 1:4], ids[1, [0, 4, 6]] = IMAGE, IMAGE
    return {"ids": ids, "images": torch.randn(ROWS, IMAGES, PIXELS, dtype=torch.float64)}


def made(way: Callable[..., Tensor]) -> tuple[Model, Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Model(way).double(), given()
    return model, capture(model, batch), batch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", PLACED + REAL)
def test_loss_and_gradients_are_those_of_the_model(way: Callable[..., Tensor]) -> None:
    model, program, batch = made(way)
    assert not any("masked_scatter" in str(node.target) for node in program.graph.graph.nodes)
    own = {name: model.get_parameter(fqn) for name, fqn in program.parameters.items()}
    values = own | batch | {name: value for name, value in program.constants.items()}
    (ours,) = program.graph(*(values[n.name] for n in program.graph.graph.find_nodes(op="placeholder")))
    theirs, parameters = model(**batch), list(model.parameters())
    torch.testing.assert_close(ours, theirs)
    for found, truth in zip(*(torch.autograd.grad(x, parameters) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, truth)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [written_to_rows, added_to_rows, multiplied, added_to_features, side_by_side])
def test_as_many_rows_as_features_is_a_check_of_each_batch(way: Callable[..., Tensor]) -> None:
    _, program, batch = made(way)
    checks = [a.condition for a in program.assumptions if a.condition is not None]
    assert checks
    assert all(check.holds(batch) for check in checks)
    batch["ids"][0, 0] = IMAGE
    assert not all(check.holds(batch) for check in checks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", REAL)
def test_that_no_image_is_padding_is_a_check_of_each_batch(way: Callable[..., Tensor]) -> None:
    _, program, batch = made(way)
    (check,) = [a.condition for a in program.assumptions if "selects every row" in a.what]
    assert check is not None
    assert check.holds(batch)
    batch["images"][1, 2] = 0
    assert not check.holds(batch)


def selected_tokens(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    return torch.cat(x[mask].split(mask.sum(1).tolist()))


def of_parameters(m: Any, x: Tensor, mask: Tensor, images: Tensor) -> Tensor:
    real = m.encode.weight[:, 0] != 0
    return torch.cat(m.encode.weight[real].split(real.view(2, -1).sum(1).tolist()))


@pytest.mark.parametrize("way", [selected_tokens, of_parameters])
def test_a_mask_that_may_select_less_or_that_no_host_can_check_is_refused(way: Callable[..., Tensor]) -> None:
    with pytest.raises(PlanError, match=r"data|selected rows") as caught:
        made(way)
    assert "test_features.py" in str(caught.value)
