"""Helpers that keep the tensors they made: captured as they compute, and empty again for the user's next call."""

from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError
from planner import plan
from tests.models.one_body import SPEC, WIDTH, Body, OneBody, assert_capture_equals, batch


@lru_cache
def table(length: int, width: int = WIDTH) -> Tensor:
    return torch.outer(torch.arange(length).double(), torch.arange(width).double() / 7).cos()


class Angles:
    @cache  # noqa: B019
    def of(self, length: int) -> tuple[Tensor, list[int]]:
        return table(length).sin(), [length]

    @staticmethod
    @lru_cache(2)
    def shifted(length: int, *, by: float) -> Tensor:
        return table.__wrapped__(length) + by


def counted(function: Any) -> Callable[..., Tensor]:
    kept = lru_cache(function)
    return wraps(function)(lambda *args: kept(*args))


angles = Angles()
wrapped_table = counted(table.__wrapped__)
_TABLES: dict[int, Tensor] = {}


def memo(length: int) -> Tensor:
    if length not in _TABLES:
        _TABLES[length] = table.__wrapped__(length)
    return _TABLES[length]


def memo_by_default(length: int, made: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return made.setdefault(length, table.__wrapped__(length))


class OwnTable(OneBody):
    def __init__(self) -> None:
        super().__init__(lambda model, x: x * model.own(x.shape[1]))  # pyright: ignore
        self.own = lru_cache(partial(table.__wrapped__, width=WIDTH))


KEPT: dict[str, Body] = {
    "function": lambda model, x: model.up(x) * table(x.shape[1]),
    "method": lambda model, x: model.up(x) * angles.of(x.shape[1])[0],
    "static method": lambda model, x: model.up(x) * angles.shifted(x.shape[1], by=0.5),
    "decorator of a user": lambda model, x: model.up(x) * wrapped_table(x.shape[1]),
    "global dict": lambda model, x: model.up(x) * memo(x.shape[1]),
    "dict in a default": lambda model, x: model.up(x) * memo_by_default(x.shape[1]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*KEPT, "attribute"])
def test_a_kept_table_is_captured_and_the_model_runs_as_before(name: str) -> None:
    model = OwnTable() if name == "attribute" else OneBody(KEPT[name])
    plan(model, SPEC)
    loss = model(**batch())
    assert type(loss) is Tensor
    loss.item()
    assert_capture_equals(model)


@lru_cache
def noise(length: int) -> Tensor:
    return torch.randn(length, WIDTH).double()


@lru_cache
def folded(model: OneBody) -> Tensor:
    return model.up.weight.detach() * 2


@pytest.mark.parametrize("body", [lambda m, x: x + noise(x.shape[1]), lambda m, x: x @ folded(m)])
def test_a_kept_result_that_each_step_would_compute_anew_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match="that is not made of constants") as caught:
        plan(OneBody(body), SPEC)
    assert caught.value.where.file.endswith("test_cached_functions.py")  # pyright: ignore
    assert noise.cache_info().currsize == 0
